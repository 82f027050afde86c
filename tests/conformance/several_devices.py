"""Two devices compared with the CPU.

`test_several_devices.py` runs this in its own process, because a process has one session.
"""

import copy
import os
import threading
import warnings

import opinfo
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from wooly import api, storage
from wooly.link import MIRROR_ITEM_LIMIT
from wooly_testkit.executor import executor_process

BOTH = ["cuda:0", "cuda:1"]


@pytest.fixture(scope="module", autouse=True)
def two():
    torch.set_num_threads(1)
    with executor_process() as a, executor_process() as b:
        api.attach(a.endpoints, a.session_id, a.token, executor_id="A", more=[api.Part(b.endpoints, "B")])
        api.install_facade()
        yield a, b
        api.disable()


def at(device, *tensors):
    assert all(str(t.device) == device and t.get_device() == int(device[-1]) and t.is_cuda for t in tensors)
    return True


# -- naming devices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.empty(3, device=d).zero_(),
        lambda d: torch.ones(2, 3, device=d, dtype=torch.int32),
        lambda d: torch.full((2,), 1.5, device=torch.device(d)),
        lambda d: torch.arange(2, 11, 3, device=d),
        lambda d: torch.linspace(0, 1, 7, device=d),
        lambda d: torch.eye(4, device=d),
        lambda d: torch.kaiser_window(5, device=d),
        lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
        lambda d: torch.as_tensor([1.0, 2.0], device=d),
        lambda d: torch.zeros(2).new_ones(3, device=d),
        lambda d: torch.zeros(2, device=d).new_tensor([1.0]),
        lambda d: torch.zeros(2, device=d).new_full((3,), 7),
        lambda d: torch.zeros_like(torch.ones(2, 2), device=d),
        lambda d: torch.empty_like(torch.ones(2, 2, device=d)).fill_(3),
        lambda d: torch.ones(3).to(d, torch.float64),
        lambda d: torch.ones(3).to(torch.ones(1, device=d)),
        lambda d: torch.ones(3, device=d).resize_(5)[:3],
        lambda d: torch.add(torch.ones(3, device=d), 1, out=torch.empty(0, device=d)),
        lambda d: torch.ones(3, device=d)[torch.tensor([True, False, True], device=d)],
        lambda d: torch.tensor([0, 3], device=d).nonzero(),
        lambda d: nn.Parameter(torch.ones(2, device=d)).detach(),
    ],
)
def test_factories_create_tensors_on_given_device(device, make):
    made = make(device)
    assert at(device, made) and torch.equal(made.cpu(), make("cpu"))


def test_cuda_without_index_is_current_device():
    x, y = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        made = [
            torch.ones(2, device="cuda"),
            torch.ones(2).cuda(),
            torch.rand(2, device="cuda"),
            x.to("cuda"),
            x.cuda(),
        ]
        made += [
            torch.arange(3, device="cuda"),
            torch.randperm(3, device="cuda"),
            torch.zeros(1, device=torch.device("cuda")),
        ]
        assert at("cuda:1", *made) and at("cuda:0", x + 1)
        with torch.cuda.device("cuda:0"), torch.cuda.device(-1):
            assert at("cuda:0", torch.ones(2).cuda())
        with torch.cuda.device_of(x):
            assert torch.cuda.current_device() == 0
        with torch.cuda.device_of(torch.ones(1)):
            assert torch.cuda.current_device() == 1
    torch.cuda.set_device("cuda:1")
    try:
        assert at("cuda:1", torch.ones(2).cuda(), y + 1)
    finally:
        torch.cuda.set_device(0)
    assert at("cuda:1", y.cuda(1)) and at("cuda:0", y.cuda(0), y.cuda())


def test_cuda_without_index_is_current_device_in_fake_tensors_and_compiled_functions():
    # PyTorch caches fake results without the current device, so no other test makes tensors of these sizes.
    compiled = torch.compile(lambda x: x + torch.arange(13, device="cuda") + torch.zeros(13, device="cuda"))
    with torch.cuda.device(1):
        with FakeTensorMode():
            assert str(torch.ones(11, device="cuda").device) == "cuda:1"
        found = compiled(torch.ones(13, device="cuda"))
        assert at("cuda:1", found) and found.tolist() == list(range(1, 14))


def test_current_device_is_per_thread():
    seen = []
    with torch.cuda.device(1):
        thread = threading.Thread(target=lambda: seen.append(torch.ones(1, device="cuda").get_device()))
        thread.start()
        thread.join()
    assert seen == [0]


@pytest.mark.parametrize("context", ["cuda:1", torch.device("cuda", 1)])
def test_device_context_of_the_second_device(context):
    with torch.device(context):
        made = [torch.zeros(2), nn.Linear(2, 2).weight, torch.tensor([1.0]), torch.arange(3), torch.rand(2)]
        assert at("cuda:1", *made)
    assert torch.zeros(2).is_cpu


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.ones(2, device="cuda:2"),
        lambda: torch.ones(2).to("cuda:2"),
        lambda: torch.ones(2).cuda(2),
        lambda: torch.arange(2, device="cuda:2"),
        lambda: torch.cuda.set_device(2),
        lambda: torch.cuda.device(2).__enter__(),
        lambda: torch.cuda.synchronize(2),
        lambda: torch.cuda.memory_allocated(2),
        lambda: nn.Linear(1, 1).to("cuda:2"),
    ],
)
def test_missing_device_raises_cuda_error(use):
    with pytest.raises(RuntimeError, match="CUDA error: invalid device ordinal"):
        use()


def test_device_properties_are_per_device():
    assert torch.cuda.device_count() == 2 and not torch.cuda.can_device_access_peer(0, 1)
    for device in (0, 1, "cuda:1", torch.device("cuda", 0)):
        assert torch.cuda.get_device_name(device).endswith("(WOOLY)")
        assert torch.cuda.get_device_properties(device).total_memory > 0
    for ask in (torch.cuda.get_device_name, torch.cuda.get_device_properties, torch.cuda.get_device_capability):
        with pytest.raises(AssertionError, match="Invalid device id"):
            ask(2)


def test_memory_is_counted_per_device():
    before = [torch.cuda.memory_allocated(i) for i in (0, 1)]
    kept = torch.empty(1 << 20, device="cuda:1")
    assert [torch.cuda.memory_allocated(i) - b for i, b in zip((0, 1), before, strict=True)] == [0, 4 << 20]
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(1) == before[1] + (4 << 20)
    del kept
    assert [torch.cuda.memory_allocated(i) for i in (0, 1)] == before
    assert torch.cuda.memory_stats("cuda:1")["allocated_bytes.all.current"] == before[1]
    free, total = torch.cuda.mem_get_info(1)
    assert before[1] <= total - free  # other processes of the machine take some, too


def test_buffer_ids_differ_per_device():
    a, b = (torch.ones(1, device=d) for d in BOTH)
    ids = [storage.address_of(t) >> storage.ID_SHIFT for t in (a, b)]
    assert [i & storage.DEVICE_MASK for i in ids] == [0, 1]
    with pytest.raises(RuntimeError, match="out of memory"):
        heap = storage.Heap(1)
        heap._next = storage.MAX_STORAGES
        heap.reserve_id()


# -- operands on two devices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "first", "second"),
    [
        (lambda x, y: x + y, 0, 1),
        (lambda x, y: y + x, 1, 0),
        (lambda x, y: x.add_(y), 0, 1),
        (lambda x, y: torch.mm(x, y), 0, 1),
        (lambda x, y: torch.cat([y, x]), 1, 0),
        (lambda x, y: torch.add(x, x, out=y), 0, 1),
        (lambda x, y: torch.where(x > 0, y, y), 0, 1),
        (lambda x, y: x + y.sum(), 0, 1),
        (lambda x, y: x.index_select(0, y[0].long()), 0, 1),
        (lambda x, y: x[y > 0], 0, 1),
    ],
)
def test_operands_on_two_devices_raise_pytorch_error(use, first, second):
    x, y = torch.ones(2, 2, device="cuda:0"), torch.ones(2, 2, device="cuda:1")
    words = f"Expected all tensors to be on the same device, but found at least two devices, cuda:{first} and cuda:{second}!"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=words):
            use(x, y)


def test_host_tensors_are_refused_and_host_scalars_accepted():
    y = torch.ones(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="at least two devices, cuda:1 and cpu!"):
        torch.ones(2) + y
    assert at("cuda:1", y + torch.tensor(2.0)) and (y + torch.tensor(2.0)).sum().item() == 6


def test_foreach_takes_tensors_of_several_devices():
    host = [torch.arange(3.0), torch.arange(4.0)]
    there = [t.to(d) for t, d in zip(host, BOTH, strict=True)]
    torch._foreach_mul_(there, 3.0)
    torch._foreach_add_(there, there)
    norms = torch._foreach_norm(there)
    assert [n.get_device() for n in norms] == [0, 1]
    for t, h, n in zip(there, host, norms, strict=True):
        assert torch.equal(t.cpu(), h * 6) and torch.equal(n.cpu(), (h * 6).norm())


# -- copies --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[3:, ::2],
        lambda t: t.t()[1:, 5:].half(),
        lambda t: t[:0],
        lambda t: t[0, 0],
        lambda t: t[:1].expand(4, -1),
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, t).conj().imag,
        lambda t: t > 0,
    ],
)
def test_copy_between_devices_keeps_every_bit(source, target, view):
    host = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    there = view(host.to(BOTH[source]))
    moved = there.to(BOTH[target])
    assert (
        at(BOTH[target], moved)
        and moved.stride() == view(host).to(memory_format=torch.preserve_format).clone().stride()
    )
    assert torch.equal(moved.cpu(), view(host))


def test_copy_into_a_view_of_another_device_converts_and_broadcasts():
    host = torch.randn(6, 8)
    ours, theirs = torch.zeros(8, 12, device="cuda:0", dtype=torch.float64), torch.zeros(8, 12, dtype=torch.float64)
    ours[:, ::2].copy_(host.to("cuda:1").t())
    theirs[:, ::2].copy_(host.t())
    assert torch.equal(ours.cpu(), theirs)
    ours.copy_(torch.arange(12.0, device="cuda:1"), non_blocking=True)
    assert torch.equal(ours.cpu(), torch.arange(12.0, dtype=torch.float64).expand(8, 12))


def test_copy_larger_than_one_piece_is_complete():
    host = torch.randint(-(1 << 31), 1 << 31, (5 << 20,), dtype=torch.int32)
    assert host.nbytes > 16 << 20 > MIRROR_ITEM_LIMIT
    assert torch.equal(host.to("cuda:1").to("cuda:0").cpu(), host)


def test_small_copy_of_an_unchanged_tensor_is_read_once():
    t = torch.ones(5, device="cuda:1")
    first = t.to("cuda:0")
    reads = api.session_stats()["devices"][1]["syncs"]
    assert torch.equal(first, t.to("cuda:0")) and api.session_stats()["devices"][1]["syncs"] == reads
    t.add_(1)
    assert t.to("cuda:0").sum().item() == 10


def test_copies_in_both_directions_do_not_deadlock():
    found = []

    def work(source, target, value):
        t = torch.full((1 << 19,), float(value), device=BOTH[source])
        for _ in range(10):
            t = (t + 1).to(BOTH[target]).to(BOTH[source])
        found.append((value, t.unique().tolist()))

    threads = [threading.Thread(target=work, args=(i % 2, 1 - i % 2, i), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [(i, [i + 10.0]) for i in range(4)]


# -- autograd ------------------------------------------------------------------------------------------------------------


def train(first, second, make, steps=8):
    """Train a model that is split over two devices. Returns losses, gradients and parameters on the host."""
    torch.manual_seed(3)
    head = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()).to(first)
    tail = nn.Sequential(nn.Linear(144, 20), nn.GELU(), nn.LayerNorm(20), nn.Linear(20, 5)).to(second)
    skip = nn.Linear(128, 5).to(first)
    x, y = torch.randn(16, 2, 8, 8), torch.randint(0, 5, (16,))
    parameters = [*head.parameters(), *tail.parameters(), *skip.parameters()]
    optimizer, losses = make(parameters), []
    for _ in range(steps):
        optimizer.zero_grad()
        mine = x.to(first)
        out = tail(head(mine).to(second)) + skip(mine.flatten(1)).to(second)
        loss = nn.functional.cross_entropy(out, y.to(second))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad.cpu() for p in parameters], [p.detach().cpu() for p in parameters]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    ],
    ids=["sgd", "adam", "adamw-foreach"],
)
@pytest.mark.parametrize(("first", "second"), [BOTH, BOTH[::-1], ["cuda:1", "cuda:1"]])
def test_model_over_two_devices_trains_as_on_cpu(first, second, make):
    ours, theirs = train(first, second, make), train("cpu", "cpu", make)
    assert ours[0] == theirs[0]
    for a, b in zip(ours[1] + ours[2], theirs[1] + theirs[2], strict=True):
        assert torch.equal(a, b)


def test_backward_in_user_thread_works_on_both_devices():
    host = torch.randn(4, 4)
    found = {}

    def work():
        try:
            w = host.to("cuda:1").requires_grad_()
            v = host.to("cuda:0").requires_grad_()
            ((w @ w).to("cuda:0") * v).sum().backward()
            (second,) = torch.autograd.grad((v * v).sum().to("cuda:1"), v)
            found.update(w=w.grad, v=v.grad, second=second)
        except BaseException as e:
            found["error"] = e

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "error" not in found, found
    w, v = (host.clone().requires_grad_() for _ in range(2))
    ((w @ w) * v).sum().backward()
    assert at("cuda:1", found["w"]) and torch.equal(found["w"].cpu(), w.grad)
    assert at("cuda:0", found["v"], found["second"]) and torch.equal(found["v"].cpu(), v.grad)
    assert torch.equal(found["second"].cpu(), 2 * host)


def test_compiled_function_runs_on_device_of_arguments():
    function = torch.compile(lambda x: (x * 2).relu() + 1)
    across = torch.compile(lambda x: (x.to("cuda:1") * 3).to("cuda:0") + x)
    host = torch.randn(5)
    for step in range(3):
        for device in BOTH:
            made = function(host.to(device) + step)
            assert at(device, made) and torch.equal(made.cpu(), ((host + step) * 2).relu() + 1)
        x = host + step
        assert torch.equal(across(x.to("cuda:0")).cpu(), (x * 3) + x)


@pytest.mark.parametrize("device", BOTH)
def test_streams_and_events_are_per_device(device):
    other = torch.cuda.Stream("cuda:1")
    assert other.device == torch.device("cuda:1") and torch.cuda.Stream(device).device == torch.device(device)
    with torch.cuda.stream(other):
        assert torch.cuda.current_device() == 1 and torch.cuda.current_stream() == other
        assert torch.cuda.current_stream(0) == torch.cuda.default_stream(0) != other
        event = other.record_event()
    event.synchronize()
    assert torch.cuda.current_device() == 0 and event.device == torch.device("cuda:1") and event.query()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.Stream(2)


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_recurrent_layers_have_gradients_on_their_device(kind, device):
    torch.manual_seed(0)
    local = kind(3, 4, num_layers=2)
    remote = kind(3, 4, num_layers=2)
    remote.load_state_dict(local.state_dict())
    remote.to(device)
    x = torch.randn(5, 2, 3)
    local(x)[0].square().sum().backward()
    remote(x.to(device))[0].square().sum().backward()
    for ours, theirs in zip(remote.parameters(), local.parameters(), strict=True):
        assert at(device, ours.grad) and torch.equal(ours.grad.cpu(), theirs.grad)
    with pytest.raises(RuntimeError, match="same device"):
        remote(x.to(BOTH[device == BOTH[0]]))


def test_recurrent_layer_uses_generator_of_its_device():
    torch.manual_seed(0)
    net = nn.GRU(3, 4, num_layers=2, dropout=0.5).to("cuda:1")
    x = torch.ones(5, 2, 3, device="cuda:1")
    first, second = torch.cuda.get_rng_state(0), torch.cuda.get_rng_state(1)
    made = net(x)[0]
    assert torch.equal(torch.cuda.get_rng_state(0), first) and not torch.equal(torch.cuda.get_rng_state(1), second)
    torch.cuda.set_rng_state(second, 1)
    assert torch.equal(net(x)[0].cpu(), made.cpu())


@pytest.mark.parametrize("device", BOTH)
def test_autocast_and_refused_calls_work_per_device(device):
    a = torch.randn(4, 4)
    with torch.autocast("cuda", torch.bfloat16):
        made = a.to(device) @ a.to(device)
    assert at(device, made) and torch.equal(made.cpu(), a.bfloat16() @ a.bfloat16())
    wrong = torch.zeros(3, 3, dtype=torch.int32)
    with pytest.raises(RuntimeError) as theirs:
        torch.linalg.cholesky(wrong)
    with pytest.raises(RuntimeError) as ours:
        torch.linalg.cholesky(wrong.to(device))
    assert str(ours.value) == str(theirs.value)


def test_forked_process_is_refused_on_both_devices():
    x = [torch.ones(2, device=d) for d in BOTH]
    torch.cuda.synchronize()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        said = []
        for use in (*[lambda t=t: t + 1 for t in x], *[lambda d=d: torch.ones(1, device=d) for d in BOTH]):
            try:
                use()
                said.append("nothing")
            except RuntimeError as e:
                said.append(str(e)[:40])
        os.write(write, "|".join(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 1000).decode().split("|")
    assert len(said) == 4 and all(s.startswith("Cannot re-initialize CUDA in forked") for s in said), said
    assert [float(t.sum()) for t in x] == [2, 2]


# -- random numbers, errors, wrappers ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_model_from_folder_is_spread_over_both_devices(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=96, **sizes)).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    words = torch.tensor([[5, 7, 9, 11]])
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for way in ("auto", "balanced"):
        ours = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=way).train()
        assert {str(p.device) for p in ours.parameters()} == set(BOTH)
        theirs.zero_grad()
        found, right = ours(words.to(0), labels=words.to(0)), theirs(words, labels=words)
        found.loss.backward()
        right.loss.backward()
        assert torch.equal(found.logits.cpu(), right.logits) and found.loss.item() == right.loss.item()
        pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
        assert all(p.grad.device == p.device and torch.equal(p.grad.cpu(), q.grad) for p, q in pairs)
        assert torch.equal(ours.generate(words.to(0), **options).cpu(), theirs.generate(words, **options))
    other = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cuda:1")
    assert {str(p.device) for p in other.parameters()} == {"cuda:1"}


def test_random_numbers_are_per_device():
    def draw():
        return [torch.rand(4, device=d).tolist() for d in BOTH]

    torch.manual_seed(5)
    both = draw()
    assert both[0] == both[1]
    torch.cuda.manual_seed_all(5)
    assert draw() == both
    state = torch.cuda.get_rng_state(1)
    first = draw()
    torch.cuda.set_rng_state(state, 1)
    again = draw()
    assert again[1] == first[1] and again[0] != first[0]
    states = torch.cuda.get_rng_state_all()
    assert len(states) == 2
    first = draw()
    torch.cuda.set_rng_state_all(states)
    assert draw() == first
    with torch.cuda.device(1):
        torch.cuda.manual_seed(5)
    mixed = draw()
    assert mixed[1] == both[1] and mixed[0] != both[0]


def test_deferred_error_is_raised_on_its_device():
    bad = torch.zeros(3, device="cuda:1").index_select(0, torch.tensor([9], device="cuda:1"))
    torch.cuda.synchronize(0)
    with pytest.raises(RuntimeError, match=r"index out of range(.|\n)*several_devices.py"):
        torch.cuda.synchronize("cuda:1")
    del bad


@pytest.mark.parametrize("index", [0, 1])
def test_data_parallel_over_one_device_is_the_module(index):
    torch.manual_seed(0)
    local = nn.Linear(3, 2)
    module = nn.DataParallel(copy.deepcopy(local), [index])
    x = torch.randn(4, 3)
    for given in (x, x.to(f"cuda:{index}"), x.to(f"cuda:{1 - index}")):
        module.zero_grad()
        local.zero_grad()
        y, expected = module(given), local(x)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert y.device == torch.device("cuda", index) and torch.equal(y.cpu(), expected)
        assert torch.equal(module.module.weight.grad.cpu(), local.weight.grad)
    y = nn.parallel.data_parallel(module.module, x, [index])
    assert torch.equal(y.cpu(), expected)


def test_compiled_functions_on_both_devices_do_not_deadlock():
    found = []

    def work(source, target):
        @torch.compile
        def step(t):
            return (t * 2).to(BOTH[target]) + 1

        for n in range(10):
            found.append((step(torch.full((3,), float(n), device=BOTH[source])).tolist(), [2.0 * n + 1] * 3))

    threads = [threading.Thread(target=work, args=(i, 1 - i), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert len(found) == 20 and all(ours == theirs for ours, theirs in found)


class Net(nn.Module):
    """Has parameters of several kinds, a buffer, and an argument that is a dict."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU())
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x, more):
        y = self.layers(x) + self.shift
        z = y * self.turn
        return {"out": y * more["by"], "turned": z, "sum": y.sum()}


def trained(module, data, steps=3):
    """Train some steps. Returns the results of the last one, and the parameters."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for x, by in data[:steps]:
        found = module(x, more={"by": by})
        optimizer.zero_grad()
        loss = found["out"].square().sum() + found["turned"].abs().square().sum() + found["sum"].sum()
        loss.backward()
        optimizer.step()
    return found, [p.detach().cpu() for p in module.parameters()]


@pytest.mark.parametrize("batch", [8, 5, 1])
@pytest.mark.parametrize("given", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("output", [0, 1])
def test_data_parallel_over_two_devices_trains_as_one_device(batch, given, output):
    torch.manual_seed(0)
    local = Net()
    module = nn.DataParallel(copy.deepcopy(local).to("cuda:0"), output_device=output)
    data = [(torch.randn(batch, 3), torch.rand(batch, 1)) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Was asked to gather along dimension 0, but all input tensors were scalars")
        ours, weights = trained(module, [(x.to(given), by.to(given)) for x, by in data])
    theirs, expected = trained(local, data)
    if batch > 1:
        assert {name: str(t.device) for name, t in ours.items()} == dict.fromkeys(ours, f"cuda:{output}")
        assert len(ours["sum"]) == 2
    assert torch.allclose(ours["sum"].sum().cpu(), theirs["sum"], rtol=1e-4, atol=1e-4)
    for name in ("out", "turned"):
        assert torch.allclose(ours[name].cpu(), theirs[name], rtol=1e-4, atol=1e-5)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(weights, expected, strict=True))


def test_data_parallel_uses_both_devices():
    before = [d["operations"] for d in api.session_stats()["devices"]]
    module = nn.DataParallel(nn.Linear(4, 4).to("cuda:0"))
    seen = []
    module.module.register_forward_hook(lambda _, given, result: seen.append((str(given[0].device), len(given[0]))))
    with torch.no_grad():
        y = nn.parallel.data_parallel(module.module, torch.ones(6, 4, device="cuda:0"), (0, 1), 1)
        assert torch.equal(module(torch.ones(6, 4)).cpu(), y.cpu())
    assert sorted(seen) == [("cuda:0", 3), ("cuda:0", 3), ("cuda:1", 3), ("cuda:1", 3)]
    after = [d["operations"] for d in api.session_stats()["devices"]]
    assert all(a > b for a, b in zip(after, before, strict=True))


def test_data_parallel_raises_the_error_of_a_replica():
    module = nn.DataParallel(nn.Linear(4, 4).to("cuda:0"))
    with pytest.raises(RuntimeError, match=r"Caught RuntimeError in replica 0 on device 0(.|\n)*cannot be multiplied"):
        module(torch.ones(6, 3))
    module = nn.DataParallel(nn.Linear(4, 4).to("cuda:1"))
    with pytest.raises(RuntimeError, match=r"module must have its parameters and buffers on device cuda:0"):
        module(torch.ones(6, 4))


def test_copies_among_devices_equal_the_cpu():
    comm, x = torch.cuda.comm, torch.arange(12.0).reshape(6, 2)
    here, there = comm.broadcast(x.to("cuda:0"), [0, "cuda:1"])
    assert at("cuda:0", here) and at("cuda:1", there) and torch.equal(here.cpu(), x) and torch.equal(there.cpu(), x)
    outs = [torch.zeros(6, 2, device=d) for d in BOTH]
    assert all(torch.equal(o.cpu(), x) for o in comm.broadcast(x, out=outs))
    parts = comm.scatter(x, [0, 1], [1, 5])
    assert at("cuda:0", parts[0]) and at("cuda:1", parts[1]) and [len(p) for p in parts] == [1, 5]
    assert torch.equal(comm.gather(parts, destination="cpu"), x) and at("cuda:1", comm.gather(parts, destination=1))
    into = torch.zeros(6, 2, device="cuda:1")
    assert comm.gather(parts, out=into) is into and torch.equal(into.cpu(), x)
    across = [torch.zeros(6, 1, device=d) for d in BOTH]
    assert torch.equal(comm.gather(comm.scatter(x, dim=1, out=across), dim=1, destination=-1), x)
    lists = comm.broadcast_coalesced([x.to("cuda:0"), x[0].to("cuda:0")], BOTH)
    assert [[str(t.device) for t in each] for each in lists] == [["cuda:0"] * 2, ["cuda:1"] * 2]
    added = comm.reduce_add_coalesced(lists, 1)
    assert at("cuda:1", *added) and torch.equal(added[0].cpu(), 2 * x) and torch.equal(added[1].cpu(), 2 * x[0])


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda c, x: c.scatter(x, [0, 1], [3, 2, 1]), "same length"),
        (lambda c, x: c.scatter(x, [0, 1], out=[x]), "Exactly one of"),
        (lambda c, x: c.broadcast(x, out=[torch.zeros(1, device="cuda:0")]), "same shape"),
        (lambda c, x: c.broadcast_coalesced([x.to("cuda:1")], [0, 1]), r"on devices\[0\] = cuda:0"),
        (lambda c, x: c.gather([x], destination=0, out=x), "'destination' must not be specified"),
    ],
)
def test_wrong_copies_among_devices_are_refused(use, words):
    with pytest.raises(RuntimeError, match=words):
        use(torch.cuda.comm, torch.ones(6))


OPERATORS = [
    "add", "addmm", "arange", "argsort", "bernoulli", "cat", "clone", "cumsum", "diag_embed", "einsum",
    "fft.rfft", "full", "gather", "index_put", "linalg.cholesky_ex", "linalg.svd", "masked_select", "matmul", "median",
    "new_zeros", "nn.functional.conv2d", "nn.functional.embedding", "nn.functional.layer_norm",
    "nn.functional.scaled_dot_product_attention", "nonzero", "randn", "scatter_add", "softmax", "sort", "split", "std_mean",
    "take_along_dim", "topk", "unique", "view_as_complex", "where", "zeros_like",
]  # fmt: skip


@pytest.mark.parametrize("op", [op for op in opinfo.op_db if opinfo.key(op) in OPERATORS], ids=opinfo.key)
def test_operator_on_second_device_equals_cpu(op, monkeypatch):
    compare = opinfo.compare

    def placed(ours, theirs, **options):
        strays = [t.device for t in opinfo.tensors(ours) if t.device != torch.device("cuda", 1)]
        return ("wrong", f"results on {strays}") if strays else compare(ours, theirs, **options)

    monkeypatch.setattr(opinfo, "compare", placed)
    requires = op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = opinfo.samples_of(op, "function", torch.float32, requires, 4)
        outcomes = [o for s in samples for o in opinfo.results_of(s, "function", "cuda:1", requires)]
    # Another test compares strides on one device; this test compares values and devices.
    assert outcomes and all(outcome in ("pass", "layout") for outcome, _ in outcomes), outcomes


def test_statistics_exist_per_device_and_in_total():
    stats = api.session_stats()
    assert [d["executor_id"] for d in stats["devices"]] == ["A", "B"]
    for name in ("operations", "programs", "bytes_sent", "syncs"):
        assert stats[name] == sum(d[name] for d in stats["devices"]) and all(d[name] > 0 for d in stats["devices"])
