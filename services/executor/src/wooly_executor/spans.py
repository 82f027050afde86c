"""The spans of a session in its trace. Their number is small, however much the session runs.

    executor.session     from its hello to its end; parent of the others
    executor.define      definition of a program, up to the limit of single spans
    executor.first_run   first run of each program
    executor.compile     waiting for a plan (`plans.compilation`)
    executor.compile_throttle  child of executor.compile: waiting for the permit to compile
    executor.runs        sums of what ran in a period, no span per run; the period grows with the session's age
    executor.swap_out, executor.swap_in

A run costs one test whether it is a first run. The device loop's thread owns this module.
"""

from __future__ import annotations

import time
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from wooly_bus.tracing import context_of, traceparent, tracer

from wooly_executor.counters import Counters, Work

#: Maximum number of spans of single events in one session. Swaps have a limit of the same size of their own.
SINGLE = 256
#: Initial period of the spans of sums, in ns. After each `PERIODS` spans the period doubles, up to `LONGEST_NS`.
PERIOD_NS = 1_000_000_000
PERIODS = 16
LONGEST_NS = 3600 * 1_000_000_000
_COUNTED = ("programs", "instructions", "bytes_in", "bytes_out")


class SessionSpans:
    """The spans of one session.

    Args:
        session_id: id of the session.
        parent: context of the parent span.
        now: ns since 1970.

    Attributes:
        fresh: digests of programs whose first run will get a span.
        parent: the session's own span, as `traceparent`.
    """

    def __init__(self, session_id: str, parent: Context, now: int) -> None:
        self._tracer = tracer("executor")
        self._span = self._tracer.start_span("executor.session", parent, start_time=now)
        self._span.set_attribute("session_id", session_id)
        self._context = trace.set_span_in_context(self._span, Context())
        self.parent = traceparent(self._span)
        self.fresh: set[bytes] = set()
        self._seen: set[bytes] = set()
        self.left_out = 0
        self._left = self._swaps_left = SINGLE
        self._since, self._period, self._told = now, PERIOD_NS, 0
        self._counts: dict[str, int] = {}

    def take(self) -> bool:
        """Whether one more span of a single event is allowed. It counts as used."""
        if self._left <= 0:
            self.left_out += 1
            return False
        self._left -= 1
        return True

    def _tell(self, name: str, begun: int, ended: int, **attributes: Any) -> None:
        self._tracer.start_span(f"executor.{name}", self._context, attributes=attributes, start_time=begun).end(ended)

    def defined(self, digest: bytes, nbytes: int, begun: int) -> None:
        """Record a definition if the program is new."""
        if digest not in self._seen and self.take():
            self._seen.add(digest)
            name = digest.hex()[:16]
            self._tell("define", begun, time.time_ns(), program=name, bytes=nbytes)
            if self._left > 0:
                self.fresh.add(digest)

    def ran(self, digest: bytes, begun: int, gpu_ns: int, instructions: int, failed: bool) -> None:
        """Record the end of a run if it is the program's first."""
        if digest not in self.fresh:
            return
        self.fresh.discard(digest)
        if self.take():
            name, now = digest.hex()[:16], time.time_ns()
            span = self._tracer.start_span("executor.first_run", self._context, start_time=begun or now)
            span.set_attributes({"program": name, "gpu_ns": gpu_ns, "instructions": instructions})
            if failed:
                span.set_status(trace.StatusCode.ERROR)
            span.end(now)

    def swapped(self, direction: str, begun: int, nbytes: int) -> None:
        """Record a swap; `direction` is `out` or `in`."""
        if self._swaps_left <= 0:
            self.left_out += 1
            return
        self._swaps_left -= 1
        self._tell(f"swap_{direction}", begun, time.time_ns(), bytes=nbytes)

    def failed(self, code: str, message: str) -> None:
        """Record a failed request of the client."""
        self._span.set_status(trace.StatusCode.ERROR, code)
        self._span.set_attributes({"error.type": code, "error.message": message})

    def sample(self, counters: Counters, work: Work, now: int, *, last: bool = False) -> None:
        """Record the sums since the last sample, if the period has passed."""
        if now - self._since < self._period and not last:
            return
        counts = {name: getattr(counters, name) for name in _COUNTED}
        counts |= {k: v for k, v in work.to_json().items() if k.endswith("_ns")}
        gained = {k: v - self._counts.get(k, 0) for k, v in counts.items()}
        if gained["programs"]:
            self._tell("runs", self._since, now, **{k: v for k, v in gained.items() if v})
            self._told += 1
            if self._told % PERIODS == 0:
                self._period = min(2 * self._period, LONGEST_NS)
        self._since, self._counts = now, counts

    def end(self, counters: Counters, work: Work, swaps: int, reason: str) -> None:
        """End the session's span."""
        now = time.time_ns()
        self.sample(counters, work, now, last=True)
        totals = {f"total_{k}": v for k, v in self._counts.items()}
        self._span.set_attributes(totals | {"reason": reason, "swaps": swaps, "left_out": self.left_out})
        self._span.end(now)


def spans_of(session_id: str, hosted: trace.SpanContext | None, hello: object) -> SessionSpans | None:
    """The spans of a session whose client has sent a hello. None: the session is not traced.

    Args:
        session_id: id of the session.
        hosted: trace context in which the control plane had the session opened.
        hello: `traceparent` of the client's own span. It is used only if it belongs to the same trace.
    """
    if hosted is None:
        return None
    parent = trace.set_span_in_context(trace.NonRecordingSpan(hosted), Context())
    if isinstance(hello, str) and len(hello) <= 64:
        theirs = context_of(hello)
        if trace.get_current_span(theirs).get_span_context().trace_id == hosted.trace_id:
            parent = theirs
    return SessionSpans(session_id, parent, time.time_ns())


def hosted_under() -> trace.SpanContext | None:
    """The context of the current span, if it is recorded; else None."""
    span = trace.get_current_span()
    return span.get_span_context() if span.is_recording() else None
