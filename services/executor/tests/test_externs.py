"""The allow-list of `extern` is the output of its tool for the installed torch."""

from pathlib import Path

import pytest
import torch
import wooly_wis
from wooly_executor.runtime.torch_private import OpOverload
from wooly_testkit import forks
from wooly_wis.externs import allowed
from wooly_wis.optable import TABLE
from wooly_wis.releases import LIFETIMES, lacks, minor_of

SERVICE = Path(__file__).parents[1]


def test_allow_list_matches_installed_torch():
    written = (Path(wooly_wis.__file__).parent / "data/extern_ops.txt").read_text()
    listed = written.partition(":")[0].removeprefix("# ")
    if listed != torch.__version__.partition("+")[0]:
        pytest.skip(f"the list is that of torch {listed}; operators of another release are not offered")
    shown = forks.run("list_externs", like="wooly_executor", cwd=SERVICE / "tools", timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == written, "run services/executor/tools/list_externs.py"


def test_operators_that_installed_torch_lacks_are_listed():
    """The client refuses these by name, before a program that the executor's library cannot run is sent."""
    native = {spelling.operator for row in TABLE.values() for spelling in row.spellings}
    assert not native & LIFETIMES.keys()

    def has(name):
        _, packet, overload = name.split(".")
        return isinstance(getattr(getattr(torch.ops.aten, packet, None), overload, None), OpOverload)

    assert minor_of(torch.__version__) is not None
    assert {n for n in allowed() | native if not has(n)} == {n for n in LIFETIMES if lacks(torch.__version__, n)}
