"""Tables for terminals. Numbers and ids are not truncated if the terminal is wide enough for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

#: Width, in characters, of the gap between two columns, and minimum width of a truncated column.
GAP, MIN_WIDTH = 2, 12


class _Plain(Table):
    """A table whose cells are shown as they are: "[rank0]" in a name or an error is no markup."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*[Text(c) if isinstance(c, str) else c for c in cells], **options)


def plain_table() -> Table:
    """A table without lines. If there is not enough room, columns with `no_wrap` are truncated and other columns are not."""
    return _Plain(box=None, pad_edge=False, padding=(0, GAP, 0, 0))


class Fitted:
    """A table that computes the widths of its columns when it is drawn.

    If the table is too wide, cells with several words wrap, and columns with `no_wrap` are truncated.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self._table.columns
        room = options.max_width - GAP * (len(columns) - 1)
        whole = [c for c in columns if not c.no_wrap]
        cut = [c for c in columns if c.no_wrap]
        for measured in (_line, _word):
            for column in whole:
                column.width = _widest(column, measured)
            left = room - sum(c.width or 0 for c in whole)
            if left >= sum(min(_widest(c, _line), MIN_WIDTH) for c in cut):
                break
        for column in cut:
            column.width = max(min(_widest(column, _line), left), MIN_WIDTH)
        yield self._table


def _widest(column: Column, measured: Callable[[str], int]) -> int:
    return max(measured(c.plain if isinstance(c, Text) else str(c)) for c in (column.header, *column.cells))


def _line(text: str) -> int:
    return len(text)


def _word(text: str) -> int:
    return max(map(len, text.split()), default=0)
