"""Counts the bytecode instructions of Wooly's functions during a piece of work.

Time depends on the machine and on what else runs there. The number of bytecode instructions does not: it is the same in every
run with the same release of Python. So a test can compare it with a number in a file, and a review shows which function grew.
What C code does is not counted.
"""

from __future__ import annotations

import functools
import gc
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

#: The path of a module of Wooly. Its second group is the path within its distribution.
_OURS = re.compile(r"(.*/src/)?(wooly(?:_\w+)?/.*)\.py")


@functools.cache
def name_of(code: CodeType) -> str:
    """``module: function`` of a function of Wooly, the same on every machine; empty for other functions.

    Other libraries change with their releases, and this repository cannot make them faster.
    """
    if code.co_filename == "<string>":  # `dataclasses` writes these functions
        return f"dataclasses: {code.co_name}"
    found = _OURS.fullmatch(code.co_filename)
    if found is None:
        return ""
    return f"{found[2].removesuffix('/__init__').replace('/', '.')}: {code.co_qualname}"


def count(work: Callable[[], Any], repeat: int = 9, before: Callable[[], Any] = lambda: None) -> Counter[str]:
    """Return the instructions by function of the usual run: the one whose total is most frequent.

    A few runs do more than the others: every sixteenth run of a program looks at its measured times.

    Args:
        work: what to count, in its steady state. It runs in this thread; what other threads do is not counted.
        repeat: number of runs.
        before: is done before each run and not counted.
    """
    runs: dict[int, Counter[str]] = {}
    totals: Counter[int] = Counter()
    enabled = gc.isenabled()
    gc.disable()  # finalizers would run at random places
    try:
        for _ in range(repeat):
            before()
            named: Counter[str] = Counter()
            for code, instructions in _counted(work).items():
                if name := name_of(code):
                    named[name] += instructions
            total = named.total()
            totals[total] += 1
            runs.setdefault(total, named)
            if totals[total] > repeat // 2:  # the other runs cannot change the result
                break
    finally:
        if enabled:
            gc.enable()
    return runs[min(totals, key=lambda total: (-totals[total], total))]


def _counted_by_tracing(work: Callable[[], Any]) -> Counter[CodeType]:
    """Count with `sys.settrace`. Python 3.11 has nothing else."""
    counters: dict[int, tuple[CodeType, list[int], Any]] = {}  # by identity: the hash of a code object is slow

    def counter_of(code: CodeType) -> Any:
        seen = [0]

        def inside(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "opcode":
                seen[0] += 1
            return inside

        counters[id(code)] = code, seen, inside
        return inside

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        known = counters.get(id(code))
        if known is None and not name_of(code):
            return None  # not ours: it runs at full speed
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return counter_of(code) if known is None else known[2]

    before = sys.gettrace()
    sys.settrace(called)
    try:
        work()
    finally:
        sys.settrace(before)
    found: Counter[CodeType] = Counter()
    for code, seen, _ in counters.values():
        found[code] += seen[0]
    return found


def _counted_by_monitoring(work: Callable[[], Any]) -> Counter[CodeType]:
    """Count with `sys.monitoring`, which reports the instructions of all threads."""
    found: Counter[CodeType] = Counter()
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    here, thread = threading.get_ident(), threading.get_ident

    def executed(code: CodeType, offset: int) -> None:
        if thread() == here:
            found[code] += 1

    tool, event = monitoring.PROFILER_ID, monitoring.events.INSTRUCTION
    monitoring.use_tool_id(tool, "wooly-costs")
    try:
        monitoring.register_callback(tool, event, executed)
        monitoring.set_events(tool, event)
        try:
            work()
        finally:
            monitoring.set_events(tool, 0)
            monitoring.register_callback(tool, event, None)
    finally:
        monitoring.free_tool_id(tool)
    return found


_counted = _counted_by_monitoring if sys.version_info >= (3, 12) else _counted_by_tracing
