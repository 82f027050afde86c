"""Processes that are captured by WOOLYAI_CAPTURE, without a stack. Tests with a stack are in tests/e2e/test_children.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner
from wooly import capture, visible
from wooly.cli.commands import app

cli = CliRunner()
FIRST_WORDS = "import sys; print([m for m in sys.modules if m.partition('.')[0] == 'wooly'], len(sys.meta_path))"


def python(*argv, **env):
    done = subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, timeout=60, env=os.environ | env, check=True
    )
    return done.stdout.strip()


@given(listed=st.text("0123456789,- ", max_size=12), count=st.integers(0, 8))
def test_visible_devices_are_those_of_torch(listed, count):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(visible.VISIBLE, listed)
        named = torch.cuda._parse_visible_devices()
        assert visible.visible(count) == next((i for i, n in enumerate(named) if n >= count), len(named))


def test_all_devices_are_visible_by_default(monkeypatch):
    monkeypatch.delenv(visible.VISIBLE, raising=False)
    assert visible.visible(3) == 3


@pytest.mark.parametrize("value", ["", "0"])
def test_python_imports_nothing_of_wooly_if_capture_is_off(value):
    off = python("-c", FIRST_WORDS, WOOLYAI_CAPTURE=value)
    assert off.startswith("[] ")


def test_python_awaits_torch_if_capture_is_on():
    on, off = [int(python("-c", FIRST_WORDS, WOOLYAI_CAPTURE=v).split()[-1]) for v in "10"]
    assert on == off + 1


def test_captured_program_may_ask_for_torch_before_it_imports_it():
    code = (
        "import importlib.util as u; u.find_spec('torch'); import torch; from wooly import api; print(api.is_enabled())"
    )
    assert python("-c", code, WOOLYAI_CAPTURE="1") == "True"


def test_program_may_ask_for_triton_before_it_imports_it():
    code = (
        "from wooly.triton_capture import activate; activate(None); import importlib.util as u; u.find_spec('triton'); "
        "import triton; print(type(triton.runtime.driver.active).__name__)"
    )
    assert python("-c", code) == "WoolyDriver"


@pytest.mark.parametrize(
    ("argv", "own"),
    [
        (["python", "train.py"], False),
        (["python", "train.py", "-m", "wooly_executor"], False),
        (["python", "-c", "pass", "wooly"], False),
        (["python", "-m", "pytest"], False),
        (["python", "-W", "wooly", "train.py"], False),
        (["python"], False),
        (["python", "/venv/bin/wooly", "run", "x.py"], True),
        (["python", "-X", "dev", "-m", "wooly", "status"], True),
        (["python", "-m", "wooly_executor"], True),
        (["python", "-m", "wooly_local.supervisor", "--gpus", "2"], True),
    ],
)
def test_own_commands_and_services_are_not_captured(monkeypatch, argv, own):
    monkeypatch.setattr(sys, "orig_argv", argv)
    assert capture.is_own_process() is own


def test_report_has_line_per_session_and_survives_killed_process(monkeypatch, tmp_path):
    path = tmp_path / "report"
    monkeypatch.setenv(capture.VARIABLE, str(path))
    assert capture.read_report(str(path)) == []
    capture.report_session("a", {"operations": 1})
    with path.open("a") as report:
        report.write('{"session_id": "b", "sta\n')
    capture.report_session("c", {"operations": 2})
    assert [(s["session_id"], s["stats"]["operations"]) for s in capture.read_report(str(path))] == [("a", 1), ("c", 2)]


@pytest.mark.parametrize("value", ["1", "relative", "/no/such/folder/report"])
def test_report_that_cannot_be_written_is_no_error(monkeypatch, tmp_path, value):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(capture.VARIABLE, value)
    capture.report_session("a", {})
    assert not list(tmp_path.iterdir())


def test_env_captures_programs_of_shell_and_off_undoes_it(monkeypatch):
    monkeypatch.setenv("WOOLYAI_CONTROLLER_URL", "nats://127.0.0.1:1")
    monkeypatch.setenv("SHELL", "/bin/bash")
    on, off = [cli.invoke(app, ["env", *more]) for more in ([], ["--off"])]
    assert on.exit_code == off.exit_code == 0, on.output
    said = 'echo "$WOOLYAI_CAPTURE|$(command -v python)|$PATH"'
    words = f"{on.stdout}{said}\n{off.stdout}{said}"
    before = os.environ["PATH"].removeprefix(os.path.dirname(sys.executable) + os.pathsep)
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, check=True, env={"PATH": before})
    captured, free = done.stdout.splitlines()
    assert captured.startswith(f"1|{Path(sys.executable).parent}/python|") and captured.endswith(before)
    assert free.startswith("|") and free.endswith(f"|{before}")


def test_env_as_json_and_for_other_shells(monkeypatch):
    monkeypatch.setenv("WOOLYAI_CONTROLLER_URL", "nats://127.0.0.1:1")
    variables = json.loads(cli.invoke(app, ["env", "--json"]).stdout)
    assert variables == capture.variables()
    assert "set -gx WOOLYAI_CAPTURE 1;" in cli.invoke(app, ["env", "--shell", "fish"]).stdout
    assert "$Env:WOOLYAI_CAPTURE = '1'" in cli.invoke(app, ["env", "--shell", "powershell"]).stdout


def test_env_without_stack_says_what_to_start(monkeypatch, tmp_path):
    monkeypatch.setenv("WOOLYAI_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("WOOLYAI_CONTROLLER_URL", raising=False)
    result = cli.invoke(app, ["env"])
    assert result.exit_code == 0 and "wooly up" in result.stderr and "wooly up" not in result.stdout


def test_notebook_kernel_is_installed_without_token_and_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("WOOLYAI_CONTROLLER_URL", "nats://control:4222")
    monkeypatch.setenv("WOOLYAI_CREDENTIAL", "secret")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share/jupyter"))
    result = cli.invoke(app, ["jupyter", "install", "--prefix", str(tmp_path)])
    assert result.exit_code == 0, result.output
    spec = json.loads((tmp_path / "share/jupyter/kernels/wooly/kernel.json").read_text())
    assert spec["argv"][0] == sys.executable and spec["env"]["WOOLYAI_CAPTURE"] == "1"
    assert spec["env"]["WOOLYAI_CONTROLLER_URL"] == "nats://control:4222" and "secret" not in json.dumps(spec)
    assert cli.invoke(app, ["jupyter", "remove"]).exit_code == 0
    assert not (tmp_path / "share/jupyter/kernels/wooly").exists()
    assert cli.invoke(app, ["jupyter", "remove"]).exit_code == 1
