"""The allow-list of `extern` is the output of its tool for the installed torch."""

from pathlib import Path

import pytest
import torch
import wooly_wis
from wooly_testkit import forks

SERVICE = Path(__file__).parents[1]


def test_allow_list_matches_installed_torch():
    written = (Path(wooly_wis.__file__).parent / "data/extern_ops.txt").read_text()
    listed = written.partition(":")[0].removeprefix("# ")
    if listed != torch.__version__.partition("+")[0]:
        pytest.skip(f"the list is that of torch {listed}; operators of another release are not offered")
    shown = forks.run("list_externs", like="wooly_executor", cwd=SERVICE / "tools", timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == written, "run services/executor/tools/list_externs.py"
