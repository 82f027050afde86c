"""What is told of a session in its trace: a few spans, however much it runs.

    executor.session     from its hello to its end; the others are its children
    executor.define      a program's definition, as long as there are spans left
    executor.first_run   the first run of each
    executor.compile     waiting for a plan (`compilation`); of that, executor.leisure until it was asked for
    executor.runs        what it ran in a while: sums, no span per run; the while grows with the session's age
    executor.swap_out, executor.swap_in

A run costs one look at whether it is a first one. Owned by the device loop's thread.
"""

from __future__ import annotations

import time
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from wooly_bus.tracing import context_of, traceparent, tracer

from wooly_executor.counters import Counters, Work

#: Spans of single events in one session; swaps have as many of their own.
SINGLE = 256
#: The first spans of sums are this far apart; after so many of them, twice as far, and so on up to the longest.
PERIOD_NS = 1_000_000_000
PERIODS = 16
LONGEST_NS = 3600 * 1_000_000_000
_COUNTED = ("programs", "instructions", "bytes_in", "bytes_out")


class SessionSpans:
    """The spans of one session.

    Args:
        session_id: whose.
        parent: what they are under.
        now: ns since 1970.

    Attributes:
        fresh: programs whose first run is to be told of, by digest.
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
        """Whether there may be one more span of a single event."""
        if self._left <= 0:
            self.left_out += 1
            return False
        self._left -= 1
        return True

    def _tell(self, name: str, begun: int, ended: int, **attributes: Any) -> None:
        self._tracer.start_span(f"executor.{name}", self._context, attributes=attributes, start_time=begun).end(ended)

    def defined(self, digest: bytes, nbytes: int, begun: int) -> None:
        """A program was defined, perhaps for the first time."""
        if digest not in self._seen and self.take():
            self._seen.add(digest)
            name = digest.hex()[:16]
            self._tell("define", begun, time.time_ns(), program=name, bytes=nbytes)
            if self._left > 0:
                self.fresh.add(digest)

    def ran(self, digest: bytes, begun: int, gpu_ns: int, instructions: int, failed: bool) -> None:
        """A program ended, perhaps for the first time."""
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
        """The session's memory went `out` or came `in`."""
        if self._swaps_left <= 0:
            self.left_out += 1
            return
        self._swaps_left -= 1
        self._tell(f"swap_{direction}", begun, time.time_ns(), bytes=nbytes)

    def failed(self, code: str, message: str) -> None:
        """Something that the client asked for failed."""
        self._span.set_status(trace.StatusCode.ERROR, code)
        self._span.set_attributes({"error.type": code, "error.message": message})

    def sample(self, counters: Counters, work: Work, now: int, *, last: bool = False) -> None:
        """Sum up what it ran since the last time, if that is long ago."""
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
        """The session is over."""
        now = time.time_ns()
        self.sample(counters, work, now, last=True)
        totals = {f"total_{k}": v for k, v in self._counts.items()}
        self._span.set_attributes(totals | {"reason": reason, "swaps": swaps, "left_out": self.left_out})
        self._span.end(now)


def spans_of(session_id: str, hosted: trace.SpanContext | None, hello: object) -> SessionSpans | None:
    """The spans of a session whose client says hello; None where it is not traced.

    Args:
        hosted: what the control plane had the session opened under.
        hello: the `traceparent` of the client's own span, which counts where it is of the same trace.
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
    """The context of the current span, where it is recorded."""
    span = trace.get_current_span()
    return span.get_span_context() if span.is_recording() else None
