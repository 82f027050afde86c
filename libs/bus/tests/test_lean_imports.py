"""Tests of imports without what is not needed, such as nats-py without aiohttp."""

import importlib
import importlib.util
import subprocess
import sys

import pytest
from wooly_bus.lean_imports import unavailable


@pytest.mark.skipif(importlib.util.find_spec("aiohttp") is None, reason="aiohttp is not installed")
def test_aiohttp_is_imported_only_by_its_first_use():
    code = (
        "import sys; from wooly_bus.lean_imports import import_nats; import_nats()\n"
        "from nats.aio import transport\n"
        "before = [name for name in ('aiohttp', 'multidict') if name in sys.modules]\n"
        "from aiohttp import ClientSession\n"
        "assert transport.aiohttp.ClientSession is ClientSession and transport.aiohttp\n"
        "import_nats()\n"
        "print('nats.aio.client' in sys.modules, before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True []\n", done.stderr


def test_module_is_available_again_after_the_block(tmp_path, monkeypatch):
    sys.modules.pop("this_is_not_imported", None)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "this_is_not_imported.py").write_text("value = 1\n")
    with unavailable("this_is_not_imported", "sys"):
        with pytest.raises(ImportError):
            importlib.import_module("this_is_not_imported")
        assert importlib.import_module("sys") is sys
    assert importlib.import_module("this_is_not_imported").value == 1
