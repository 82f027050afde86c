"""Steps under way over a distant link: as many as the link holds, in place of vLLM's two.

vLLM schedules a step while the one before it is computed: a step needs no token of earlier ones, because they stay on the device.
Two steps hide what the scheduler needs, but not a round trip that takes as long as many steps: the device waits for the client
then. The number of steps follows the round trip and the time of a step. Near the device, nothing changes.

A request that ends is computed for some more steps, because its end is seen a round trip later. vLLM drops these tokens, as it
does with its one such step.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

#: Round trip, in seconds, from which on a link is distant. Two steps under way hide a shorter one.
DISTANT_S = 0.002
#: Number of steps under way of vLLM itself, and largest number.
NEAR, MOST = 2, 32
#: Number of steps whose times are remembered. A prompt makes single steps long.
REMEMBERED = 15


class StepsAhead:
    """How many steps may be under way, from the times at which steps were sent and answered.

    Args:
        trip_s: returns the connection's round trip, in seconds.
        clock: returns seconds.
    """

    def __init__(self, trip_s: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self._trip_s, self._clock = trip_s, clock
        self._sent: deque[float] = deque()
        self._answered: float | None = None
        #: Of the last steps: the time since the answer to the step before, and the time since the step was sent.
        self._gaps: deque[float] = deque(maxlen=REMEMBERED)
        self._ages: deque[float] = deque(maxlen=REMEMBERED)

    def sent(self) -> None:
        """A step is under way from now on."""
        if not self._sent:
            self._answered = None  # the device had nothing to do
        self._sent.append(self._clock())

    def answered(self) -> None:
        """The oldest step that was under way has been answered."""
        now, sent = self._clock(), self._sent.popleft()
        if self._answered is not None:
            self._gaps.append(now - self._answered)
            self._ages.append(now - sent)
        self._answered = now

    def wanted(self) -> int:
        """The number of steps that should be under way: those that the round trip holds, one at the device, and one that waits.

        If the device always has a next step, the time between answers is that of a step. If not, an answer takes a round trip
        and a step. The other of both times is too long in either case. Answers come in bursts, so only their average tells.
        """
        trip_s = self._trip_s()
        if trip_s < DISTANT_S or not self._gaps:
            return NEAR
        step_s = min(statistics.fmean(self._gaps), statistics.fmean(self._ages) - trip_s)
        return MOST if step_s * MOST <= trip_s else min(MOST, math.ceil(trip_s / step_s) + NEAR)


def supports(config: Any) -> bool:
    """Whether a server's steps need nothing from the answers of earlier steps, and are scheduled in this process alone.

    Args:
        config: the server's `VllmConfig`.
    """
    parallel = config.parallel_config
    return bool(
        config.scheduler_config.async_scheduling
        and config.use_v2_model_runner
        and config.speculative_config is None
        and config.kv_transfer_config is None
        and parallel.world_size == parallel.data_parallel_size == 1
        and config.model_config.runner_type == "generate"
    )


def limit(core: Any, wanted: int) -> int:
    """The number of steps that may be under way now.

    Only `NEAR` may be in three cases: a structured output needs the token of the step before; the scheduler waits for answers,
    or all requests will end with them; more tokens are under way than vLLM's largest step has. vLLM reserves memory for two.

    Args:
        core: vLLM's `EngineCore`.
        wanted: the number that the link wants.
    """
    steps, scheduler = [scheduled.total_num_scheduled_tokens for _, scheduled, _ in core.batch_queue], core.scheduler
    if wanted == NEAR or not steps:
        return wanted
    if not steps[0] or sum(steps) > core.vllm_config.scheduler_config.max_num_batched_tokens:
        return NEAR
    running = scheduler.running
    if any(r.use_structured_output for r in running) or (not scheduler.waiting and all(map(_ends, running))):
        return NEAR
    return wanted


def _ends(request: Any) -> bool:
    """Whether a request's last token is under way."""
    return bool(request.num_output_tokens + request.num_output_placeholders >= request.max_tokens)


def step(core: Any, real: Callable[[Any], Any]) -> Any:
    """Replaces `EngineCore.step_with_batch_queue`: the same, with another size of the queue.

    Args:
        core: vLLM's `EngineCore`.
        real: vLLM's function.
    """
    if not hasattr(core, "steps_ahead"):
        core.steps_ahead = _of_session() if supports(core.vllm_config) else None
        core.batch_queue = deque(core.batch_queue, maxlen=MOST)
    ahead, queue = core.steps_ahead, core.batch_queue
    if ahead is None:
        return real(core)
    before, newest = len(queue), queue[0] if queue else None
    size = limit(core, ahead.wanted())
    core.batch_queue_size = max(size, before + 1)
    with _nothing_new(core.scheduler) if before >= size else contextlib.nullcontext():
        result = real(core)
    added = bool(queue) and queue[0] is not newest
    if added:
        ahead.sent()
    for _ in range(before + added - len(queue)):
        ahead.answered()
    return result


@contextlib.contextmanager
def _nothing_new(scheduler: Any) -> Iterator[None]:
    """Let the scheduler have no requests, so that vLLM's function waits for the oldest step and sends none."""
    scheduler.has_requests = lambda: False
    try:
        yield
    finally:
        del scheduler.has_requests


def _of_session() -> StepsAhead | None:
    """The number for this process's session; None if the session is in another process."""
    from wooly import api  # here, because tests of this module's rules need no client

    if not api.has_session():
        return None
    (link,) = api.attached_links()
    return StepsAhead(lambda: link.waits.trip_s)


def install() -> None:
    """Replace the function. Calling it again changes nothing."""
    from vllm.v1.engine.core import EngineCore

    real = EngineCore.step_with_batch_queue
    if not hasattr(real, "of_wooly"):

        def step_with_batch_queue(self: Any) -> Any:
            return step(self, real)

        step_with_batch_queue.of_wooly = True  # type: ignore[attr-defined] # marks the replacement
        EngineCore.step_with_batch_queue = step_with_batch_queue
