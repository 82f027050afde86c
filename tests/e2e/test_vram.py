"""Sharing a device's memory through the whole stack: real clients that load the same weights, die, or exceed the device."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from itertools import pairwise

import nats
import pytest
from wooly_bus import contracts
from wooly_bus.access import options
from wooly_bus.stream_reader import read_stream
from wooly_testkit import forks
from wooly_testkit.control import ask
from wooly_testkit.forks import Forked
from wooly_wis.messages import NodesRequest

pytestmark = [pytest.mark.connected, pytest.mark.timeout(240)]
MIB = 1 << 20
EXECUTOR = {
    "WOOLY_EXECUTOR_MEMORY": str(96 * MIB),
    "WOOLY_EXECUTOR_RESERVE": "0",
    "WOOLY_EXECUTOR_LARGE_ALLOCATION": str(MIB),
    "WOOLY_EXECUTOR_SWAP_IDLE_S": "0.2",
    "WOOLY_EXECUTOR_SWAP_HOST": str(80 * MIB),
    "WOOLY_EXECUTOR_SWAP_DISK": str(512 * MIB),
    "CONTROLLER_DEFAULT_VRAM_OVERCOMMIT_PERCENT": "50",
}
#: A client that executes commands, one line of Python each, and prints the value of `out`.
WORK = """
import json, sys, torch, wooly
from wooly import api
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    out = None
    try:
        exec(json.loads(line))
    except Exception as e:
        out = f"{type(e).__name__}: {e}"
    print(json.dumps(out), flush=True)
"""


@contextlib.contextmanager
def started(folder, **executor):
    running = forks.start_stack(folder, **(EXECUTOR | executor))
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with started(tmp_path_factory.mktemp("stack")) as running:
        yield running


class Client:
    def __init__(self, stack, path, **settings):
        path.write_text(WORK)
        env = os.environ | stack.client_env | {f"WOOLYAI_{k}": str(v) for k, v in settings.items()}
        self.process = Forked(
            "wooly", "run", "-q", str(path), env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if (said := self.process.stdout.readline()) != "ready\n":
            self.end()
            pytest.fail(f"the client said {said!r}, not that it is ready, and ended with {self.process.returncode}")

    def tell(self, code):
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def hear(self):
        return json.loads(self.process.stdout.readline())

    def do(self, code):
        self.tell(code)
        return self.hear()

    def end(self):
        if self.process.stdin.closed:
            return
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture
def client(stack, tmp_path):
    made = []

    def make(**settings):
        made.append(Client(stack, tmp_path / f"{len(made)}.py", **settings))
        return made[-1]

    yield make
    for each in made:
        each.end()
    until(stack, lambda m: not m["sessions"])


def wooly(stack, *arguments, **settings):
    env = os.environ | stack.client_env | {f"WOOLYAI_{k}": v for k, v in settings.items()}
    return forks.run("wooly", *arguments, env=env, timeout=100)


def memory(stack):
    (node,) = ask(stack, contracts.ROUTER_NODE_LIST, NodesRequest()).nodes
    found = node.memory.model_dump(mode="json")
    assert found["own"] + found["contents"] + found["slots"] + found["reserve"] + found["free"] == found["capacity"]
    return found


def until(stack, condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition(found := memory(stack)):
        assert time.monotonic() < deadline, f"the condition did not become true: {found}"
        time.sleep(0.05)
    return found


LOAD = """
torch.manual_seed(0)
host = torch.nn.Linear(1024, 4096, bias=False)   # 16 MiB
before = api.session_stats()["bytes_sent"]
model = host.to("cuda")
torch.cuda.synchronize()
out = api.session_stats()["bytes_sent"] - before
"""
SUM = "out = model.weight.double().sum().item()"


@pytest.mark.slow  # the tests of the executor and of intercept share weights, too
def test_second_load_of_weights_sends_nothing_and_shares_cost(stack, client):
    first = client(DEDUP="tenant", TENANT="acme")
    assert first.do(LOAD) > 16 * MIB
    until(stack, lambda m: m["contents"] == 16 * MIB)
    second, stranger = client(DEDUP="tenant", TENANT="acme"), client(DEDUP="tenant", TENANT="other")
    assert second.do(LOAD) < 16 * MIB // 100
    assert stranger.do(LOAD) > 16 * MIB
    total = first.do(SUM)
    assert second.do(SUM) == total == stranger.do(SUM)
    # One client writes: the other keeps its weights.
    assert second.do("torch.nn.init.zeros_(model.weight); out = model.weight.abs().sum().item()") == 0
    assert first.do(SUM) == total
    # One client dies: the other keeps its weights, too.
    third = client(DEDUP="tenant", TENANT="acme")
    assert third.do(LOAD) < 16 * MIB // 100
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    assert third.do(SUM) == total
    until(stack, lambda m: all(s["residence"] == "here" for s in m["sessions"]) and len(m["sessions"]) == 3)


PRETRAINED = """
from transformers import AutoModelForCausalLM
torch.zeros(1, device="cuda").item()
before = api.session_stats()["bytes_sent"]
model = AutoModelForCausalLM.from_pretrained(folder, device_map="cuda")
torch.cuda.synchronize()
out = api.session_stats()["bytes_sent"] - before
"""
LOGITS = "out = model(torch.arange(5, device='cuda')[None]).logits.double().sum().item()"


@pytest.mark.slow
def test_pretrained_model_is_shared_automatically(tmp_path):
    """On a device of 4 GiB, because transformers always reserves 1.2 GiB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes))
    total = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path / "model")
    with started(tmp_path, WOOLY_EXECUTOR_MEMORY=str(4 << 30)) as stack:
        pair = [Client(stack, tmp_path / f"{n}.py", DEDUP="tenant", TENANT="hf") for n in range(2)]
        try:
            for each in pair:
                each.do(f"folder = {str(tmp_path / 'model')!r}")
            assert pair[0].do(PRETRAINED) >= total
            until(stack, lambda m: m["contents"] >= 0.95 * total)
            assert pair[1].do(PRETRAINED) < total // 100
            assert pair[0].do(LOGITS) == pair[1].do(LOGITS)
        finally:
            for each in pair:
                each.end()


@pytest.mark.slow
def test_pinned_weights_are_not_sent(stack, client, tmp_path):
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    save_file(
        {"weight": torch.nn.Linear(1024, 4096, bias=False).weight.detach(), "small": torch.ones(3)},
        tmp_path / "m.safetensors",
    )
    done = wooly(stack, "weights", "add", str(tmp_path), "--name", "base", "--json", TENANT="acme")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["name"], said["tensors"], said["bytes"], said["executors"]) == ("base", 1, 16 * MIB, 1)
    assert said["left_out"] == {}
    (kept,) = json.loads(wooly(stack, "weights", "list", "--json", TENANT="acme").stdout)["weights"]
    assert (kept["name"], kept["bytes"]) == ("base", 16 * MIB)
    user = client(DEDUP="tenant", TENANT="acme")
    assert user.do(LOAD) < 16 * MIB // 100
    total = user.do(SUM)
    removed = wooly(stack, "weights", "rm", "base", TENANT="acme")
    assert removed.returncode == 0, removed.stderr
    assert wooly(stack, "weights", "rm", "base", TENANT="acme").returncode == 1
    assert user.do(SUM) == total


def test_sessions_larger_than_device_are_swapped_and_finish(stack, client):
    """Three sessions of 40 MiB on 96 MiB: almost 150 % are promised. The sessions take turns; one of them is partly on disk."""
    clients = [client(REQUIRED_VRAM=46 * MIB, TENANT=f"t{n}") for n in range(3)]
    for n, each in enumerate(clients):
        assert each.do(f"x = torch.full((40 << 18,), {n + 1}.0, device='cuda'); out = x[-1].item()") == n + 1
    for round in range(2):
        for n, each in enumerate(clients):
            assert each.do("x += 1; out = [x[0].item(), x[-1].item()]") == [n + 2 + round] * 2
    shown = wooly(stack, "top", "--once").stdout + wooly(stack, "status").stdout
    assert "promised 138.0 MiB of 150 %" in shown and "swapped to host" in shown and "t2" in shown
    # the controller hears of the last moves with the executor's next heartbeat
    until(stack, lambda f: f["swapped_out"] >= 3 and f["swapped_in"] >= 2 and f["host"] + f["disk"] > 0)
    clients[1].process.send_signal(signal.SIGKILL)
    clients[1].process.wait()
    until(stack, lambda m: len(m["sessions"]) == 2)
    for n in (0, 2):
        assert clients[n].do("out = x[7].item()") == n + 3


def test_request_beyond_overcommit_is_refused_with_numbers(stack, client):
    client(REQUIRED_VRAM=60 * MIB, SWAP_FROM_VRAM=0)
    done = wooly(stack, "run", "-q", "-m", "this", REQUIRED_VRAM=str(40 * MIB), SWAP_FROM_VRAM="0", QUEUE_S="0")
    assert done.returncode == 1
    assert (
        f"{36 * MIB} bytes next to the memory that cannot be swapped out, but the task requests {40 * MIB}"
        in done.stderr
    )


def test_borne_memory_is_published_without_gaps(stack, client):
    """The stream as metering reads it: contiguous intervals per session, with a mark at the last one."""
    each = client(TENANT="metered")
    each.do("x = torch.zeros(20 << 18, device='cuda'); torch.cuda.synchronize()")
    time.sleep(2.5)
    each.end()

    async def read():
        access = stack.access()
        app = await nats.connect(access.url, **options(access.credentials(), None))
        found = []
        async for kept in read_stream(app.jetstream(), contracts.EXECUTOR_MEMORY_BORNE):
            if kept is not None:
                found.append(kept.payload())
            if kept is None and any(e.tenant == "metered" and e.last for e in found):
                break
        await app.close()
        return [e for e in found if e.tenant == "metered"]

    events = asyncio.run(asyncio.wait_for(read(), 30))
    assert [e.sequence for e in events] == list(range(1, len(events) + 1)) and events[-1].last
    assert all(a.to_ns == b.from_ns for a, b in pairwise(events))
    steady = max(events, key=lambda e: e.own_byte_us)
    assert 20 * MIB <= steady.own <= 22 * MIB
    assert steady.own_byte_us <= steady.own * (steady.to_ns - steady.from_ns) // 1000 + 1


def test_out_of_memory_raises_cuda_error_with_holders(stack, client):
    holder, asker = client(SWAP_FROM_VRAM=0, TENANT="a"), client(SWAP_FROM_VRAM=0, TENANT="b")
    holder.do("x = torch.zeros(60 << 18, device='cuda'); torch.cuda.synchronize()")
    said = asker.do("x = torch.empty(50 << 18, device='cuda')")  # the call that allocates
    assert said.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB.")
    assert "Sessions of other tenants hold 60.0" in said and "total capacity of 96.00 MiB" in said
    info = asker.do("out = [torch.cuda.mem_get_info(), torch.cuda.memory_stats()['num_ooms']]")
    assert info[0][0] < 40 * MIB and info[1] == 1
    assert asker.do("out = isinstance(torch.OutOfMemoryError('x'), torch.cuda.OutOfMemoryError)")
    assert asker.do("out = torch.ones(3, device='cuda').sum().item()") == 3


SMALLER = """
from accelerate.utils import find_executable_batch_size
tried = []

@find_executable_batch_size(starting_batch_size=64)
def train(size):
    tried.append(size)
    w = torch.ones(1024, 1024, device="cuda", requires_grad=True)
    x = torch.ones(size << 10, 1024, device="cuda")
    (x @ w).sum().backward()
    return size

out = [train(), tried, torch.cuda.memory_stats()["num_ooms"]]
"""


@pytest.mark.slow  # test_hugging_face_training has the retry, too
def test_smaller_batch_is_tried_after_out_of_memory(client):
    """Accelerate frees what the failed try made, and tries again, until a batch fits."""
    trainer = client(REQUIRED_VRAM=60 * MIB)
    size, tried, failed = trainer.do(SMALLER)
    assert size == tried[-1] < tried[0] and failed == len(tried) - 1
    held = "l = []\nwhile True: l.append(torch.zeros(1 << 20, device='cuda'))"
    for _ in range(3):  # all memory can be used, and used again
        assert "The session's quota is 60.00 MiB" in trainer.do(held)
        assert trainer.do("out = len(l)") == 14 + 1
        assert trainer.do("l.clear(); x = torch.ones(14 << 18, device='cuda'); out = x.sum().item(); del x") == 14 << 18
