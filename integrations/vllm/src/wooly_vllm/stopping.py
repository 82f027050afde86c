"""The end of a server: its engine gets the time to close its session, and frees only what is still there.

vLLM's server sends SIGTERM to its engine and kills it at once, except on ROCm. A killed engine closes nothing: its session would
keep the device's memory until its lease ends.
"""

from __future__ import annotations

import os

import vllm.v1.engine.core as engine
import vllm.v1.engine.utils as engines
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    destroy_distributed_environment,
    destroy_model_parallel,
)
from wooly import api

#: Seconds for which a server waits for the end of its engine. vLLM gives ROCm the same time.
GRACE_S = 15.0
#: The variable of the environment, since vLLM 0.33, that sets another time.
GRACE_VARIABLE = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"


def grace(request_timeout: float | None, process_timeout: float | None) -> float | None:
    """Replaces `get_engine_process_shutdown_timeout`: how long the server waits for the end of its engine, in seconds.

    Args:
        request_timeout: time that requests get to finish (`--shutdown-timeout`).
        process_timeout: time that vLLM would wait.
    """
    if request_timeout != 0 or process_timeout != 0:
        return process_timeout
    return float(os.environ.get(GRACE_VARIABLE) or GRACE_S)


def clean_up() -> None:
    """End vLLM's groups, and free the device's memory if there is a session. At the exit of a process, it has ended already."""
    if api.has_session():
        cleanup_dist_env_and_memory()
    else:
        destroy_model_parallel()
        destroy_distributed_environment()


def install() -> None:
    """Replace the functions. Calling it again changes nothing."""
    engine.cleanup_dist_env_and_memory = clean_up
    engines.get_engine_process_shutdown_timeout = grace
