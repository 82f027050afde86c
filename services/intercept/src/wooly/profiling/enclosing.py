"""Finds the operators of the host that contain a point in time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TypeVar

T = TypeVar("T")


def enclosing(spans: Iterable[tuple[float, float, T]], points: Sequence[float]) -> list[list[T]]:
    """For each point, the spans that contain it, outermost first.

    Args:
        spans: (start, end, span) of one thread. They are nested: of two spans, one contains the other or they do not overlap.
        points: points in time, in any order.
    """
    ordered = sorted(spans, key=lambda span: (span[0], -span[1]))
    found: list[list[T]] = [[] for _ in points]
    open_spans: list[tuple[float, T]] = []
    k = 0
    for index, point in sorted(enumerate(points), key=itemgetter(1)):
        while k < len(ordered) and ordered[k][0] <= point:
            start, end, span = ordered[k]
            while open_spans and open_spans[-1][0] <= start:
                open_spans.pop()
            open_spans.append((end, span))
            k += 1
        while open_spans and open_spans[-1][0] < point:
            open_spans.pop()
        found[index] = [span for _, span in open_spans]
    return found
