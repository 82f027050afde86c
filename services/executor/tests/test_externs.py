"""The allow-list of `extern` is what its tool writes for this torch."""

import subprocess
import sys
from pathlib import Path

import wooly_wis

SERVICE = Path(__file__).parents[1]


def test_allow_list_is_current():
    shown = subprocess.run(
        [sys.executable, str(SERVICE / "tools/list_externs.py")], capture_output=True, text=True, check=True
    )
    written = (Path(wooly_wis.__file__).parent / "data/extern_ops.txt").read_text()
    assert shown.stdout == written, "run services/executor/tools/list_externs.py"
