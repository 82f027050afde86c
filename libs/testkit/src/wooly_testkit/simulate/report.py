"""Prints rows as a table, and draws them as a plot (SVG)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, ElementTree, SubElement

from rich.console import Console
from rich.table import Table

_COLOURS = ("#3366cc", "#dc3912", "#ff9900", "#109618", "#990099")
_BAR, _GAP, _LEFT, _WIDTH = 12, 10, 260, 420


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    """Print all rows, with one column per name."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if isinstance(rows[0].get(column), str) else "right")
    for row in rows:
        table.add_row(*("" if row.get(c) is None else str(row[c]) for c in columns))
    Console(width=None if Console().is_terminal else 200).print(table)


def plot(rows: list[dict[str, Any]], labels: tuple[str, ...], value: str, path: Path) -> None:
    """Draw horizontal bars of `value`, grouped by `labels` (names of columns), with one colour per policy.

    If the largest value is above 20, the scale is logarithmic.
    """
    found = [row for row in rows if row.get(value)]
    groups = list(dict.fromkeys(" / ".join(str(row[name]) for name in labels) for row in found))
    policies = list(dict.fromkeys(row["policy"] for row in found))
    largest = max((float(row[value]) for row in found), default=1.0)
    steep = largest > 20
    scale = _WIDTH / (_logarithm(largest) if steep else largest)
    height = len(groups) * (len(policies) * _BAR + _GAP) + 60
    svg = Element("svg", xmlns="http://www.w3.org/2000/svg", width=str(_LEFT + _WIDTH + 90), height=str(height))
    svg.set("font-family", "sans-serif")
    svg.set("font-size", "11")
    _text(svg, 10, 16, value + (" (bars: logarithm)" if steep else ""))
    for n, policy in enumerate(policies):
        SubElement(svg, "rect", x=str(10 + n * 80), y="24", width="10", height="10", fill=_COLOURS[n % len(_COLOURS)])
        _text(svg, 24 + n * 80, 33, policy)
    for row in found:
        group = groups.index(" / ".join(str(row[name]) for name in labels))
        n = policies.index(row["policy"])
        y = 50 + group * (len(policies) * _BAR + _GAP) + n * _BAR
        if n == 0:
            _text(svg, 10, y + 9, groups[group])
        amount = float(row[value])
        width = (_logarithm(amount) if steep else amount) * scale
        SubElement(
            svg,
            "rect",
            x=str(_LEFT),
            y=str(y),
            width=f"{width:.1f}",
            height=str(_BAR - 2),
            fill=_COLOURS[n % len(_COLOURS)],
        )
        _text(svg, _LEFT + int(width) + 4, y + 9, f"{amount:g}")
    ElementTree(svg).write(path, encoding="utf-8", xml_declaration=True)


def _logarithm(value: float) -> float:
    from math import log10

    return log10(1 + value)


def _text(svg: Element, x: int, y: int, text: str) -> None:
    SubElement(svg, "text", x=str(x), y=str(y)).text = text
