"""`tests/matrix.py`: what it runs, and that it says what it cannot run."""

import argparse
import re
import sys
from pathlib import Path

import pytest
from wooly_wis.releases import NEWEST, OLDEST, minor_of

from tests import matrix

ROOT = Path(__file__).parents[1]


def default():
    (text,) = re.findall(r"^MATRIX \?= (.+)$", (ROOT / "Makefile").read_text(), re.M)
    return [matrix.Entry.parse(entry) for entry in text.split()]


def test_default_matrix_has_all_supported_releases():
    alone = [entry.client for entry in default() if entry.executor is None]
    assert {pair.python for pair in alone} == {"3.11", "3.12", "3.13", "3.14"}
    released = {(OLDEST[0], n) for n in range(OLDEST[1], NEWEST[1] + 1)}
    assert {minor_of(pair.torch) for pair in alone} == released
    mixed = [(e.client.torch, e.executor.torch) for e in default() if e.executor is not None]
    assert ("2.11", "2.15") in mixed and ("2.15", "2.11") in mixed


def test_entry_names_client_and_executor():
    entry = matrix.Entry.parse("3.12:2.12.1@3.13:2.14")
    assert entry.pairs == (matrix.Pair("3.12", "2.12.1"), matrix.Pair("3.13", "2.14"))
    assert str(entry) == "3.12:2.12.1@3.13:2.14" and entry.client.folder.name == "3.12-2.12.1"


@pytest.mark.parametrize("text", ["3.12", "2.12@2.13", "3.12:2", "3.12:2.13@", "3.12:2.13;rm"])
def test_entry_of_another_form_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"not of the form 3\.12:2\.12"):
        matrix.Entry.parse(text)


def test_missing_python_is_reported_and_fails(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    monkeypatch.setattr(matrix, "run", lambda *_: pytest.fail("ran without a Python"))
    monkeypatch.setattr(sys, "argv", ["matrix.py", "3.99:2.13"])
    assert matrix.main() == 1
    told = capsys.readouterr().out
    assert (
        "3.99:2.13" in told and "NOT RUN: this machine has no Python 3.99" in told and "uv python install 3.99" in told
    )


def test_program_that_is_another_python_is_not_taken(monkeypatch):
    monkeypatch.setattr(matrix, "interpreters", lambda release: iter(["/bin/false", sys.executable]))
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert matrix.find_python(own) == sys.executable
    with pytest.raises(matrix.MatrixError):
        matrix.find_python("3.99")


def test_environments_have_the_pins_but_those_of_the_releases():
    requirements, constraints = matrix.wanted()
    assert "pytest" in requirements and "-e ./services/intercept" in requirements
    assert not [
        line for line in [*requirements, *constraints] if line.startswith(("torch==", "triton==", *matrix.LEFT_OUT))
    ]
    assert any(line.startswith("numpy==") for line in constraints)
