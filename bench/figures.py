"""The output of every benchmark: one row per figure, compared with its goal, as a table or as JSON."""

import json

from rich.console import Console
from rich.table import Table

COLUMNS = ("name", "unit", "ours", "baseline", "ratio", "goal", "ok")


def row(
    name, unit, ours, baseline, goal, *, higher_is_better=False, against="ratio", speedup=False, spread=None, digits=3
):
    """Return one figure.

    `goal` limits the ratio to the baseline. Without a baseline, or with `against="value"`, it limits the figure itself. None: the
    figure is only reported. The limit is an upper one, or with `higher_is_better` a lower one. With `speedup`, the ratio is
    baseline / ours.
    """
    ratio = None
    if baseline:
        ratio = baseline / ours if speedup else ours / baseline
    value = ours if ratio is None or against == "value" else ratio
    ok = None if goal is None else bool(value >= goal if higher_is_better else value <= goal)
    numbers = [None if v is None else round(v, digits) for v in (ours, baseline, ratio)]
    found = dict(zip(COLUMNS, (name, unit, *numbers, goal, ok), strict=True))
    return found | {"spread": spread} if spread is not None else found


def show(rows, as_json, *, title=None, baseline="baseline"):
    """Print the rows: a JSON array, or a table in which the baseline has this name."""
    if as_json:
        print(json.dumps(rows))
        return
    columns = COLUMNS[:5] + (("spread",) if any("spread" in r for r in rows) else ()) + COLUMNS[5:]
    table = Table(*[baseline if c == "baseline" else c for c in columns], title=title)
    for r in rows:
        table.add_row(*["" if r.get(c) is None else str(r[c]) for c in columns])
    Console(width=130).print(table)
