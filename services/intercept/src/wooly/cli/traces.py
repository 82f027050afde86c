"""`wooly trace`: prints a list of recent traces, or one trace as a waterfall."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text
from wooly_bus import contracts
from wooly_wis.traces import SpanInfo, TraceInfo, TraceRequest, TracesRequest

from wooly.control import ControlError, Controller
from wooly.settings import Settings

#: Minimum and maximum width of the column of bars, in characters.
WIDTH = (12, 60)
#: Width of all columns except the names and the bars, in characters.
_OTHERS = 34
#: Maximum indentation of a span, in levels. Deeper spans have this indentation.
DEEPEST = 12
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")


def read(controller: Controller, settings: Settings, name: str) -> tuple[str, list[SpanInfo]]:
    """Read a trace. Returns its id and spans.

    Args:
        controller: connection to the controller.
        settings: the client's settings.
        name: id of the trace, or id of a task in the trace.

    Raises:
        ControlError: the trace does not exist.
    """
    if not re.fullmatch(r"[0-9a-f]{32}", name):
        return _pages(controller, TraceRequest(task_id=name, credential=settings.credential))
    try:
        return _pages(controller, TraceRequest(trace_id=name, credential=settings.credential))
    except ControlError as e:
        if e.code != "router.no_trace":
            raise
        return _pages(controller, TraceRequest(task_id=name, credential=settings.credential))


def _pages(controller: Controller, request: TraceRequest) -> tuple[str, list[SpanInfo]]:
    found: list[SpanInfo] = []
    while True:
        ask = request.model_copy(update={"offset": len(found)})
        reply = controller.ask(contracts.ROUTER_TRACE_GET, ask)
        found += reply.spans
        if not reply.more or not reply.spans:
            return reply.trace_id, found


def recent(controller: Controller, settings: Settings, limit: int) -> Sequence[TraceInfo]:
    """The most recent traces, newest first."""
    request = TracesRequest(credential=settings.credential, limit=limit)
    reply = controller.ask(contracts.ROUTER_TRACE_LIST, request)
    return reply.traces


def print_recent(console: Console, traces: Iterable[TraceInfo], as_json: bool) -> None:
    """Print a list of traces."""
    if as_json:
        print(json.dumps({"traces": [t.model_dump() for t in traces]}))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("task", "began", "took", "spans"):
        table.add_column(column, no_wrap=True)
    table.add_column("name", overflow="fold")
    for t in traces:
        began = time.strftime("%H:%M:%S", time.localtime(t.start_ns / 1e9))
        style = "red" if t.error else ""
        table.add_row(t.task_id or t.trace_id, began, _time(t.duration_ns), str(t.spans), Text(t.name, style=style))
    console.print(table)


def print_trace(console: Console, trace_id: str, spans: Sequence[SpanInfo], as_json: bool) -> None:
    """Print a trace as a waterfall: its spans with service, start and duration, each under its parent."""
    if as_json:
        print(json.dumps({"trace_id": trace_id, "spans": [s.model_dump() for s in spans]}))
        return
    if not spans:
        console.print(f"trace {trace_id}: no spans yet, because none of its spans has ended", highlight=False)
        return
    first, last = min(s.start_ns for s in spans), max(s.end_ns for s in spans)
    console.print(f"trace {trace_id}: {len(spans)} spans in {_time(last - first)}", highlight=False)
    services = list(dict.fromkeys(s.service for s in spans))
    table = Table(box=None, pad_edge=False)
    rows = [("  " * min(depth, DEEPEST) + span.name, span) for depth, span in in_order(spans)]
    width = min(max(console.width - _OTHERS - max(len(name) for name, _ in rows), WIDTH[0]), WIDTH[1])
    table.add_column("span", overflow="fold")
    for column in ("service", "at", "took"):
        table.add_column(column, no_wrap=True, justify="left" if column == "service" else "right")
    table.add_column("", no_wrap=True, min_width=width)
    for text, span in rows:
        colour = "red" if span.error else _COLOURS[services.index(span.service) % len(_COLOURS)]
        name = Text(text, style="red" if span.error else "")
        row = (name, span.service, _time(span.start_ns - first), _time(span.end_ns - span.start_ns))
        table.add_row(*row, Text(bar(span, first, last, width), style=colour))
    console.print(table)
    for span in spans:
        if span.error:
            why = span.attributes.get("error.message") or span.attributes.get("error.type") or ""
            console.print(f"failed: {span.name} {why}".rstrip(), style="red", highlight=False, markup=False)


def in_order(spans: Sequence[SpanInfo]) -> Iterable[tuple[int, SpanInfo]]:
    """Yield (depth, span) for all spans, ordered by start, each after its parent. A span without a known parent has depth 0."""
    known = {s.span_id: s for s in spans}
    children: dict[str, list[SpanInfo]] = {}
    tops = []
    for span in sorted(spans, key=lambda s: (s.start_ns, s.span_id)):
        if span.parent_id in known and span.parent_id != span.span_id:
            children.setdefault(str(span.parent_id), []).append(span)
        else:
            tops.append(span)
    seen: set[str] = set()
    # Spans whose parents form a cycle have no top span. Take the span that began first as the top.
    for top in (*tops, *sorted(spans, key=lambda s: (s.start_ns, s.span_id))):
        waiting = [(0, top)]
        while waiting:
            depth, span = waiting.pop()
            if span.span_id in seen:
                continue
            seen.add(span.span_id)
            yield depth, span
            waiting += [(depth + 1, child) for child in reversed(children.get(span.span_id, []))]


def bar(span: SpanInfo, first: int, last: int, width: int) -> str:
    """The bar of a span, in a column of `width` characters for the time from `first` to `last`. It has at least one character."""
    whole = max(last - first, 1)
    begin = min((span.start_ns - first) * width // whole, width - 1)
    end = max(-(-(span.end_ns - first) * width // whole), begin + 1)
    return " " * begin + "━" * (end - begin)


def _time(ns: int) -> str:
    for unit, size in (("s", 1_000_000_000), ("ms", 1_000_000)):
        if ns >= size:
            return f"{ns / size:.2f} {unit}"
    return f"{ns / 1000:.0f} us"
