"""The parts of the command line that need no stack. Tests with a stack are in tests/e2e."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import wooly
from typer.main import get_command
from typer.testing import CliRunner
from wooly import cli as command_line
from wooly.cli import smi
from wooly.cli.commands import app, called, doctor
from wooly_testkit.assembler import assemble
from wooly_wis.assembly import disassemble
from wooly_wis.codec import decode_program, encode_program

REPOSITORY = Path(__file__).parents[3]
cli = CliRunner()


@pytest.fixture
def program(tmp_path, cuda):
    """A file with a program that the client wrote."""
    import torch
    from wooly import api

    recorder = api._attached.device.recorder
    try:
        with recorder.lock:  # else the timer may cut the program in two on a busy machine
            recorder.flush()
            recorder.programs_dir = tmp_path
            (torch.ones(3, 5, device=cuda).mul(2.5).relu() + 1).sum().item()
    finally:
        recorder.programs_dir = None
    # there may be a second program, which frees tensors of earlier tests and is empty otherwise
    return max(tmp_path.glob("*.wis"), key=lambda path: path.stat().st_size)


def test_disasm_recorded_program_assembles_to_same_bytes(program):
    shown = cli.invoke(app, ["disasm", str(program)])
    assert shown.exit_code == 0, shown.output
    assert "mul" in shown.output and "f32[3, 5]" in shown.output.replace("3,5", "3, 5")
    assert encode_program(assemble(shown.output)) == program.read_bytes()
    assert disassemble(decode_program(program.read_bytes())) == shown.output


def test_disasm_other_file_is_refused(tmp_path):
    path = tmp_path / "x.wis"
    path.write_bytes(b"WIS1 and then nonsense")
    result = cli.invoke(app, ["disasm", str(path)])
    assert result.exit_code == 1 and "wooly:" in result.output


def test_run_missing_script_fails_before_stack_starts():
    result = cli.invoke(app, ["run", "no_such_script.py"])
    assert result.exit_code == 1 and "no_such_script.py" in result.output


def test_run_invalid_variable_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("WOOLYAI_PRIORITY", "9")
    script = tmp_path / "s.py"
    script.write_text("")
    result = cli.invoke(app, ["run", str(script)])
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert "WOOLYAI_PRIORITY=9: input should be less than or equal to 4" in result.output


def test_status_without_stack_prints_json_and_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("WOOLYAI_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("WOOLYAI_CONTROLLER_URL", "")
    result = cli.invoke(app, ["status", "--json"])
    assert result.exit_code == 1 and json.loads(result.output)["state"] == "down"


PAGES = [
    "README.md",
    *(path.relative_to(REPOSITORY).as_posix() for path in sorted((REPOSITORY / "docs").rglob("*.md"))),
]


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_documentation_exist(page):
    code = "\n".join(_code((REPOSITORY / page).read_text()))
    commands = {c.name or c.callback.__name__ for c in app.registered_commands} | {
        g.typer_instance.info.name for g in app.registered_groups
    }
    assert set(re.findall(r"(?:\.venv/bin/|^|\s)wooly ([a-z]+)(?=\s|$)", code, re.M)) <= commands
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|\s)make ([a-z-]+)", code, re.M)) <= targets


def test_readme_contains_commands_and_targets():
    code = "\n".join(_code((REPOSITORY / "README.md").read_text()))
    assert {"run", "up", "status", "down"} <= set(re.findall(r"wooly ([a-z]+)", code))
    assert {"run", "test"} <= set(re.findall(r"make ([a-z-]+)", code))


def _code(text):
    """Code blocks and code spans of a page."""
    return re.findall(r"```sh\n(.*?)```", text, re.S) + re.findall(r"`([^`\n]+)`", text)


def test_version_is_printed_by_option_and_by_command():
    found = [cli.invoke(app, [word]).output for word in ("--version", "version")]
    assert found == [f"{wooly.__version__}\n"] * 2
    assert "Run PyTorch programs" in cli.invoke(app, ["--help"]).output


def test_called_application_has_the_called_command_and_the_same_help():
    whole = get_command(app)
    assert {"run", "nodes", "version"} < set(whole.commands)
    for name in whole.commands:
        one = called([name, "--help"])
        assert list(get_command(one).commands) == [name]
        assert cli.invoke(one, [name, "--help"]).output == cli.invoke(app, [name, "--help"]).output
    for other in ([], ["--help"], ["--version"], ["nothing"]):
        assert called(other) is app


def test_help_does_not_import_torch():
    """`wooly --help` must not import torch, because the import takes seconds."""
    probe = "import sys; import wooly.cli.commands; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


# -- wooly smi ---------------------------------------------------------------------------------------------------------

DEVICES = [
    {
        "executor_id": f"executor-{i}",
        "node": "n",
        "device": {"name": name, "total_memory": 80 << 30},
        "memory_used": i << 30,
        "utilization": 0.256 * i,
        "memory": {"reserve": 2 << 30},
    }
    for i, name in enumerate(["NVIDIA H100", "a CPU, with a comma"])
]


def test_smi_query_has_the_form_of_nvidia_smi():
    assert smi.query(DEVICES[:1], "index,name,memory.total,memory.free,utilization.gpu,temperature.gpu", "csv") == (
        "index, name, memory.total [MiB], memory.free [MiB], utilization.gpu [%], temperature.gpu\n"
        "0, NVIDIA H100, 81920 MiB, 79872 MiB, 0 %, [N/A]\n"
    )
    assert smi.query(DEVICES, "memory.used, utilization.gpu,count", "csv,noheader,nounits") == "0, 0, 2\n1024, 26, 2\n"


def test_smi_query_of_name_with_comma_keeps_the_cells_apart():
    assert smi.query(DEVICES[1:], "name,index", "csv,noheader") == "a CPU\\, with a comma, 0\n"


@pytest.mark.parametrize(("names", "how"), [("index,nothing", "csv"), ("index", "xml"), ("index", "csv,short")])
def test_smi_query_of_unknown_field_or_format_is_refused(names, how):
    with pytest.raises(smi.QueryError, match=r"not a valid field|must be csv"):
        smi.query(DEVICES, names, how)


def test_closed_standard_streams_are_opened_so_that_no_socket_takes_their_numbers():
    code = (
        "import os, sys; from wooly import cli; cli._open_streams(); print(1); r, w = os.pipe(); assert min(r, w) > 2"
    )
    done = subprocess.run(["sh", "-c", f'exec "{sys.executable}" -c "{code}" <&- >&-'], capture_output=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    done = subprocess.run(["sh", "-c", f'exec "{sys.executable}" -c "{code}" <&- >&- 2>&-'], timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [(["top"], b"?cuda?"), (["run", "--help"], b"?cuda?"), (["run", "script.py"], None), (["record", "s.py"], None)],
)
def test_commands_print_in_every_encoding_and_scripts_get_pythons_error(monkeypatch, arguments, printed):
    """Under LC_ALL=C or latin-1, a command printed its traceback in place of its table."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(command_line.sys, "argv", ["wooly", *arguments])
    monkeypatch.setattr(command_line.sys, "stdout", out)
    command_line._print_everywhere()
    with contextlib.nullcontext() if printed else pytest.raises(UnicodeEncodeError):
        out.write("“cuda”")
        out.flush()
        assert out.buffer.getvalue() == printed


@pytest.mark.parametrize(("cores", "hint"), [(1, True), (2, False)])
def test_doctor_says_that_the_executor_computes_on_some_cores_only(monkeypatch, cores, hint):
    """A shell that sets OMP_NUM_THREADS makes the device of `wooly up` slower, which nothing else shows."""
    device = {"name": "EPYC", "vendor": "cpu", "cores": cores}
    nodes = [{"executor_id": "local-0", "node": doctor.socket.gethostname(), "state": "alive", "device": device}]
    nodes.append({"executor_id": "far", "node": "another host", "state": "alive", "device": device | {"cores": 64}})
    monkeypatch.setattr(doctor, "nodes_of", lambda settings: nodes)
    monkeypatch.setattr(doctor.host, "cores", lambda: 2)
    found = doctor._check_executor(None)
    assert found.startswith(f"local-0 (EPYC, {cores} cores), far (EPYC, 64 cores)")
    assert ("OMP_NUM_THREADS" in found) is hint
    if hint:
        assert "1 of the 2 cores" in found
