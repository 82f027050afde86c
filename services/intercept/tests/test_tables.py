"""Tables do not truncate numbers and ids if there is little room."""

import io

import pytest
from rich.console import Console
from wooly.cli.commands.app import fail
from wooly.cli.tables import Fitted, plain_table


def shown(width, rows):
    table = plain_table()
    table.add_column("task")
    table.add_column("core credits", justify="right")
    table.add_column("name, reason", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=width).print(Fitted(table))
    return out.getvalue()


@pytest.mark.parametrize("width", [48, 80, 200])
def test_fitted_table_truncates_only_no_wrap_columns(width):
    rows = [("fd35ec9af87ff09c", "1,234.567"), ("775b347bbb34976e", "0.333")]
    text = shown(
        width, [(*row, "a script's name: and a long, long story of why it waits, and for whom") for row in rows]
    )
    assert all(word in text for row in rows for word in row)
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines)
    assert len(lines) == 3
    assert ("…" in text) == (width < 200)


def test_cells_and_errors_show_square_brackets_as_they_are(capsys):
    """Rich's markup would swallow "[rank0]", and "[/data]" would be an error of its own."""
    text = "[rank0]: no such file: [/data]"
    assert text in shown(80, [("id", "1", text)])
    fail(RuntimeError(text))
    assert capsys.readouterr().err == f"wooly: {text}\n"


def test_fitted_table_narrow_wraps_between_words():
    text = shown(42, [("fd35ec9af87ff09c", "1,234.567", "a script")])
    assert text.split() == [
        "core",
        "task",
        "credits",
        "name,",
        "reason",
        "fd35ec9af87ff09c",
        "1,234.567",
        "a",
        "script",
    ]
