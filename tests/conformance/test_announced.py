"""What clients announce of operators' results, compared with CUDA's kernels. `announced_exceptions.txt` lists the differences."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.connected


def test_announced_exceptions_are_dtypes_shapes_and_layouts(conformance):
    assert {line[3] for line in conformance("announced").listed()} <= {"dtype", "shape", "layout"}


_SAMPLES = """
from types import SimpleNamespace
import torch
from announced import inputs_of
parts = [(torch.ones(3), (torch.ones(()),), {"indexing": word}) for word in ("ij", "xy")]
print(len({inputs_of(SimpleNamespace(parts=p)) for p in parts}))
"""


@pytest.mark.slow
def test_samples_that_differ_only_in_a_word_are_different_inputs():
    command = [sys.executable, "-c", _SAMPLES]
    assert subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() == "2"


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_announced_results_equal_cudas_except_listed(conformance, report):
    """A quarter of an hour on two cores. The list may only shrink."""
    announced = conformance("announced")
    rows = announced.sweep(workers=2)
    total = report("announced results", rows)
    assert total["pass"] >= 0.99 * (total.total() - total["skip"]) and total["skip"] <= 0.1 * total.total()
    announced.assert_none_is_new(rows)
    announced.assert_all_listed_fail(rows)
