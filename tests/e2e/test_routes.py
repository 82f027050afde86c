"""Connections from the client to an executor on another host: TLS, and a tunnel through NATS if no route exists."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from wooly_testkit import forks
from wooly_testkit.certificates import make_certificates

pytestmark = [pytest.mark.connected, pytest.mark.timeout(180)]
TRAINING = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    x, y = torch.randn(50, 20), torch.arange(50) % 3
    model, x, y = model.to(DEVICE), x.to(DEVICE), y.to(DEVICE)
    for _ in range(20):  # by hand: PyTorch's optimizers import Dynamo, which takes seconds of CPU time in each process
        loss = torch.nn.functional.cross_entropy(model(x), y)
        model.zero_grad(); loss.backward()
        with torch.no_grad():
            [p.sub_(p.grad, alpha=0.1) for p in model.parameters()]
        print(loss.item().hex())
    big = torch.arange(3_000_000, dtype=torch.float64)
    print(torch.equal((big.to(DEVICE) * 2).cpu(), big * 2))
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"), "localhost")


@pytest.fixture(scope="module")
def stack(certificates, tmp_path_factory):
    """A stack whose executor listens only with TLS."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("WOOLY_EXECUTOR_LISTEN", "tls://localhost:0")
        environment.setenv("WOOLY_EXECUTOR_TLS_CERT", str(certificates.certificate))
        environment.setenv("WOOLY_EXECUTOR_TLS_KEY", str(certificates.key))
        running = forks.start_stack(tmp_path_factory.mktemp("stack"), ephemeral=True)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """The output of the training on the CPU."""
    folder = tmp_path_factory.mktemp("cpu")
    (folder / "script.py").write_text(textwrap.dedent(TRAINING).replace("DEVICE", "'cpu'"))
    done = forks.run("script", like="wooly_executor", cwd=folder, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def run(stack, tmp_path):
    """Runs the training like a user, with the given settings."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(TRAINING).replace("DEVICE", "'cuda'"))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WOOLYAI_")}

    def start(**settings):
        return forks.run("wooly", "run", str(path), env=clean | stack.client_env | settings, timeout=120)

    return start


def test_training_over_tls_equals_the_cpu(run, certificates, figures):
    done = run(WOOLYAI_TLS_CA=str(certificates.authority), WOOLYAI_CHANNEL="direct")
    assert done.returncode == 0, done.stderr
    assert done.stdout == figures and "tls://localhost" in done.stderr


@pytest.mark.slow  # the tunnel itself has its tests in libs/bus
def test_training_through_nats_equals_the_cpu(run, figures):
    done = run(WOOLYAI_CHANNEL="tunnel")
    assert done.returncode == 0, done.stderr
    assert done.stdout == figures and "nats://" in done.stderr


@pytest.mark.parametrize("channel", ["auto", pytest.param("direct", marks=pytest.mark.slow)])
def test_untrusted_certificate_fails_without_fallback(run, channel):
    """Even if a tunnel would work: the error names the same remedy in every case, and no other connection is tried."""
    done = run(WOOLYAI_CHANNEL=channel, WOOLYAI_PLAINTEXT="1")
    assert done.returncode == 1 and done.stdout == ""
    assert "failed, and no other endpoint is tried, because this could be an attack" in done.stderr
    assert "the executor's certificate is not trusted" in done.stderr and "WOOLYAI_TLS_CA" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["executor-0", "nats"])
def test_broken_tunnel_reports_error_and_does_not_hang(tmp_path, victim):
    own = forks.start_stack(tmp_path / "own", ephemeral=True)
    path = tmp_path / "script.py"
    path.write_text(
        "import torch\nt = torch.zeros(9, device='cuda')\nprint(t.sum().item(), flush=True)\nwhile True: t = t + 1\n"
    )
    try:
        env = os.environ | own.client_env | {"WOOLYAI_CHANNEL": "tunnel", "WOOLYAI_RECOVERY": "off"}
        client = subprocess.Popen(
            [sys.executable, "-m", "wooly", "run", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        assert client.stdout.readline() == "0.0\n"
        os.kill(own.services[victim], signal.SIGKILL)
        _, errors = client.communicate(timeout=60)
        assert client.returncode == 1 and "lost the executor" in errors and "tunnel" in errors
    finally:
        own.stop()
