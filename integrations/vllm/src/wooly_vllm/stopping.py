"""Gives the engine of a server that is stopped the time to close its session.

vLLM's server sends SIGTERM to its engine and kills it at once, except on ROCm. A killed engine closes nothing: its session would
keep the device's memory until its lease ends.
"""

from __future__ import annotations

import vllm.v1.engine.utils as engines

#: Seconds for which a server waits for the end of its engine. vLLM gives ROCm the same time.
GRACE_S = 15.0


def grace(request_timeout: float | None, process_timeout: float | None) -> float | None:
    """Replaces `get_engine_process_shutdown_timeout`: how long the server waits for the end of its engine, in seconds.

    Args:
        request_timeout: time that requests get to finish (`--shutdown-timeout`).
        process_timeout: time that vLLM would wait.
    """
    return GRACE_S if request_timeout == 0 and process_timeout == 0 else process_timeout


def install() -> None:
    """Replace the function. Calling it again changes nothing."""
    engines.get_engine_process_shutdown_timeout = grace
