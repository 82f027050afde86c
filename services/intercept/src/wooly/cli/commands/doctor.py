"""`wooly doctor`: checks the installation, or counts the operators of a script that the client's CPU computes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from wooly_bus import host
from wooly_bus.errors import shown

from wooly.cli.commands.app import Json, app, fail, out, read_settings
from wooly.cli.commands.cluster import nodes_of
from wooly.control import connect
from wooly.errors import WoolyError
from wooly.local_stack import begin, local_stack
from wooly.settings import Settings, load, unknown_variables


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def doctor(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="[SCRIPT]", help="With --fallbacks: script to run.")] = "",
    as_json: Json = False,
    fallbacks: Annotated[
        bool,
        typer.Option("--fallbacks", help="Count operators on device tensors that the CPU of this machine computes."),
    ] = False,
) -> None:
    """Check everything that a run needs, and say how to repair what is missing."""
    sys.argv[0] = "wooly doctor"  # becomes the name of its sessions
    if fallbacks:
        raise typer.Exit(_count_fallbacks(script, list(context.args), as_json))
    checks: list[dict[str, Any]] = []

    def check(name: str, probe: Callable[[], str]) -> bool:
        try:
            checks.append({"check": name, "ok": True, "detail": probe()})
        except Exception as e:
            detail = str(e).split("\n  recorded at ")[0]  # the line is one of this module, not of a script
            checks.append({"check": name, "ok": False, "detail": detail})
        return bool(checks[-1]["ok"])

    check("python", _check_python)
    check("torch", _check_torch)
    check("native kernels", _check_native)
    settings: list[Settings] = []
    if check("configuration", lambda: _check_configuration(settings)):
        if settings[0].executor_url:
            detail = "not used: WOOLYAI_EXECUTOR_URL names an executor"
            checks.append({"check": "controller", "ok": True, "detail": detail})
        elif _starts_its_own(settings[0]):
            detail = "not running: each run starts its own stack; start one with `wooly up`, and runs begin sooner"
            checks.append({"check": "controller", "ok": True, "detail": detail})
            begin(settings[0])
        else:
            check("controller", lambda: shown(connect(settings[0]).url))
            check("executor", lambda: _check_executor(settings[0]))
        if check("round trip", _check_round_trip):
            check("kernels", _check_kernels)
    if as_json:
        print(json.dumps({"ok": all(c["ok"] for c in checks), "checks": checks}))
    else:
        for c in checks:
            out.print(
                f"{'[green]ok  [/]' if c['ok'] else '[red]FAIL[/]'} {c['check']:14} {escape(c['detail'])}",
                highlight=False,
                soft_wrap=True,
            )
    sys.stdout.flush()
    if not all(c["ok"] for c in checks):
        raise typer.Exit(1)


def _starts_its_own(settings: Settings) -> bool:
    module = None if settings.controller_url else local_stack()
    return module is not None and module.read_stack(settings.state_dir) is None


def _count_fallbacks(script: str, arguments: list[str], as_json: bool) -> int:
    """Run a script, or a small training, and count its fallbacks. Returns the exit code."""
    if script and not Path(script).exists():
        raise fail(FileNotFoundError(f"can't open file {script!r}: the file does not exist"))
    from wooly import api
    from wooly.cli import script as runner
    from wooly.fallbacks import Fallbacks

    try:
        api.enable(read_settings())
    except WoolyError as e:
        raise fail(e) from e
    device = api.attached_device()
    with Fallbacks(device) as counted:
        code = runner.run(script, arguments, module=False) if script else _exercise()
    inferences = device.generic.inferences
    api.disable()
    found = counted.found
    report = {
        "ok": not found,
        "operations": counted.calls,
        "fallbacks": dict(sorted(found.items())),
        "inferences": {
            "on_meta": inferences.on_meta,
            "on_host_zeros": inferences.on_host,
            "trials_on_host_zeros": inferences.trials,
        },
    }
    if as_json:
        print(json.dumps(report))
    else:
        out.print(
            f"{counted.calls:,} operations on device tensors; the CPU of this machine computed {found.total():,} of them\n"
            f"call signatures inferred: {inferences.on_meta:,} on meta tensors, {inferences.on_host:,} on zeros; "
            f"{inferences.trials:,} tried on zeros to find errors (these use no device data)",
            highlight=False,
            soft_wrap=True,
        )
        for name, n in found.most_common():
            out.print(f"  [red]{name}[/] {n:,}", highlight=False)
    sys.stdout.flush()
    return code or (1 if found else 0)


def _exercise() -> int:
    """Run a few training steps with many kinds of operators. Returns the exit code 0."""
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to("cuda")
    body = torch.nn.Sequential(torch.nn.Conv1d(16, 8, 3), torch.nn.BatchNorm1d(8), torch.nn.Flatten()).to("cuda")
    recurrent, head = torch.nn.LSTM(48, 16).to("cuda"), torch.nn.Linear(16, 10).to("cuda")
    parameters = [p for m in (encoder, body, recurrent, head) for p in m.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    x, y = torch.randn(4, 8, 16, device="cuda"), torch.randint(10, (4,), device="cuda")
    for _ in range(3):
        optimizer.zero_grad()
        hidden, _state = recurrent(body(encoder(x).transpose(1, 2))[None])
        loss = functional.cross_entropy(head(hidden[0]), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    kept = x[x > 0].sort().values.unique()
    print(f"loss {loss.item():.4f}, {len(kept)} of {x.numel()} kept", file=sys.stderr)
    return 0


def _check_python() -> str:
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        raise RuntimeError(
            f"Python {platform.python_version()} is not supported; Wooly is tested with 3.11 to 3.14: install one of them"
        )
    return platform.python_version()


def _check_torch() -> str:
    import torch

    release = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])
    if not (2, 11) <= release <= (2, 15):
        raise RuntimeError(
            f"torch {torch.__version__} is not supported; Wooly is tested with 2.11 to 2.15: pip install torch==2.13.0"
        )
    return str(torch.__version__)


def _check_native() -> str:
    from wooly import native

    return native.describe()


def _check_configuration(found: list[Settings]) -> str:
    found.append(load())
    strange = unknown_variables()
    return "valid" + (f"; unknown variables, which have no effect: {', '.join(strange)}" if strange else "")


def _check_executor(settings: Settings) -> str:
    alive = [n for n in nodes_of(settings) if n["state"] == "alive"]
    if not alive:
        raise RuntimeError("no executor is registered; start one with `wooly up` or `python -m wooly_executor`")
    found = ", ".join(f"{n['executor_id']} ({n['device']['name']}, {n['device']['cores']} cores)" for n in alive)
    here = [n["device"]["cores"] for n in alive if n["node"] == socket.gethostname() and n["device"]["vendor"] == "cpu"]
    if here and sum(here) + len(here) <= host.cores():  # more than what is left when executors share the cores
        found += (
            f"; {sum(here)} of the {host.cores()} cores of this machine: was OMP_NUM_THREADS set when they started?"
        )
    return found


@contextlib.contextmanager
def _session() -> Iterator[None]:
    """A session for a check. A full cluster is a finding, not a reason to wait."""
    from wooly import api

    api.enable(read_settings().model_copy(update={"queue_s": 0.0}))
    try:
        yield
    finally:
        api.disable()


def _check_round_trip() -> str:
    import torch

    with _session():
        x = torch.ones(2, device="cuda")
        value, took = 0.0, float("inf")
        for _ in range(5):  # the first round trip takes longer
            started = time.perf_counter()
            value = float((x + 1).sum())
            took = min(took, time.perf_counter() - started)
    if value != 4.0:
        raise RuntimeError(f"the device computed a wrong result: the sum of [1, 1] + 1 is 4.0, but it returned {value}")
    return f"{took * 1e6:.0f} µs"


def _check_kernels() -> str:
    """Build and run a kernel: an executor may compute with torch and yet be unable to build code for its device."""
    import torch

    from wooly import cuda_kernel

    if importlib.util.find_spec("wooly_cuda_c") is None:
        return "not checked: CUDA C needs wooly-cuda-c beside wooly, which is not installed"
    text = "__global__ void twice(float *x, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] *= 2; }"
    with _session():
        x = torch.arange(300.0).to("cuda")
        started = time.perf_counter()
        cuda_kernel(text, "twice")(grid=(2, 1, 1), block=(256, 1, 1), args=[x, x.numel()])
        if not torch.equal(x.cpu(), torch.arange(300.0) * 2):
            raise RuntimeError("a kernel that doubles the numbers 0 to 299 computed a wrong result")
        return f"a kernel in CUDA C was built, and ran, in {time.perf_counter() - started:.2f} s"
