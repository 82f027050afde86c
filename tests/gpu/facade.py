"""The use of `torch.cuda`, tensors, generators and files by scripts: names, types, texts, and the relations between them.

Every case states CUDA's answer, because the CPU cannot give it. With a GPU, the answer is checked, too.
"""

import copy
import io
import pickle

import torch
from cases import Case, Raises
from torch import nn

_CASES = []


def case(name, known, **kwargs):
    """A decorator: the function is a case with a known answer of CUDA."""

    def add(function):
        _CASES.append(Case(name, function, known=known, exact_text=True, **kwargs))
        return function

    return add


def cases(selection):
    return [c for c in _CASES if selection.takes(c.group)]


def _kind(value):
    return type(value).__name__


def _raised(call):
    """The type and first line of the exception that a call raises."""
    try:
        call()
    except Exception as e:
        return [type(e).__name__, str(e).splitlines()[0] if str(e) else ""]
    return None


# -- devices -------------------------------------------------------------------------------------------------------------


@case("device/questions", [True, True, "int", "str", "tuple", True, True])
def _(device):
    c = torch.cuda
    return [
        c.is_available(), c.is_initialized() or c.init() is None, _kind(c.device_count()), _kind(c.get_device_name()),
        _kind(c.get_device_capability()), c.current_device() == 0, c.is_bf16_supported(),
    ]  # fmt: skip


@case("device/properties", {
    "name": "str", "major": "int", "minor": "int", "total_memory": "int", "multi_processor_count": "int",
    "is_integrated": "int", "is_multi_gpu_board": "int", "max_threads_per_multi_processor": "int", "warp_size": "int",
    "L2_cache_size": "int", "regs_per_multiprocessor": "int", "shared_memory_per_block": "int", "gcnArchName": "str",
})  # fmt: skip
def _(device):
    p = torch.cuda.get_device_properties(0)
    names = (
        "name", "major", "minor", "total_memory", "multi_processor_count", "is_integrated", "is_multi_gpu_board",
        "max_threads_per_multi_processor", "warp_size", "L2_cache_size", "regs_per_multiprocessor",
        "shared_memory_per_block", "gcnArchName",
    )  # fmt: skip
    return {name: "int" if isinstance(getattr(p, name), int) else _kind(getattr(p, name)) for name in names}


@case("device/properties by every name of the device", [True] * 4)
def _(device):
    p = torch.cuda.get_device_properties
    return [p(d).name == torch.cuda.get_device_name() for d in (0, "cuda", "cuda:0", torch.device("cuda"))]


@case("device/properties agree", [True, True])
def _(device):
    p = torch.cuda.get_device_properties(0)
    return [(p.major, p.minor) == torch.cuda.get_device_capability(), p.total_memory == torch.cuda.mem_get_info()[1]]


@case("device/architectures", [True, "list"])
def _(device):
    return [bool(torch.cuda.get_arch_list()), _kind(torch.cuda.get_arch_list())]


@case("device/properties of a missing device", Raises("AssertionError", "Invalid device id"))
def _(device):
    torch.cuda.get_device_properties(99)


@case("device/set a missing device", Raises("AcceleratorError", "CUDA error: invalid device ordinal"))
def _(device):
    torch.cuda.set_device(99)


@case("device/tensor on a missing device", Raises("AcceleratorError", "CUDA error: invalid device ordinal"))
def _(device):
    torch.zeros(1, device="cuda:99")


@case("device/move to a missing device", Raises("AcceleratorError", "CUDA error: invalid device ordinal"))
def _(device):
    torch.zeros(1).to("cuda:99")


@case("device/set to a negative index", 0)
def _(device):
    torch.cuda.set_device(-1)
    return torch.cuda.current_device()


@case("device/set to the CPU", ["ValueError", "Expected a cuda device, but got: cpu"])
def _(device):
    return _raised(lambda: torch.cuda.set_device("cpu"))


@case("device/set to no device", ["RuntimeError", "Expected one of"])
def _(device):
    kind, text = _raised(lambda: torch.cuda.set_device("gpu"))
    return [kind, text[:15]]


@case("device/contexts", [0, "cuda:0", "cuda:0", "cpu"])
def _(device):
    with torch.cuda.device(0):
        index = torch.cuda.current_device()
        inside = torch.zeros(1, device="cuda").device
    with torch.device("cuda"):
        made = torch.zeros(1).device
    return [index, str(inside), str(made), str(torch.zeros(1).device)]


@case("device/default", ["cuda:0", "cuda"])
def _(device):
    torch.set_default_device("cuda")
    try:
        return [str(torch.ones(1).device), torch.get_default_device().type]
    finally:
        torch.set_default_device(None)


@case("device/accelerator", ["cuda", True, 0])
def _(device):
    a = torch.accelerator
    return [a.current_accelerator().type, a.is_available(), a.current_device_index()]


# -- memory --------------------------------------------------------------------------------------------------------------

_MEMORY = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
)  # fmt: skip


@case("memory/functions", dict.fromkeys(_MEMORY, "int"))
def _(device):
    return {name: _kind(getattr(torch.cuda, name)()) for name in _MEMORY}


@case("memory/no results", [None] * 6)
def _(device):
    c = torch.cuda
    return [
        c.empty_cache(), c.reset_peak_memory_stats(), c.reset_max_memory_allocated(), c.ipc_collect(), c.synchronize(),
        c.reset_accumulated_memory_stats(),
    ]  # fmt: skip


@case("memory/grows and shrinks", [True, True, True, True])
def _(device):
    c = torch.cuda
    c.synchronize()
    c.reset_peak_memory_stats()
    before = c.memory_allocated()
    t = torch.zeros(1 << 20, device="cuda")
    during, reserved = c.memory_allocated(), c.memory_reserved()
    del t
    after = c.memory_allocated()
    return [during - before >= 1 << 22, after == before, c.max_memory_allocated() >= during, reserved >= during]


@case("memory/info and summary", [True, True, "str", True])
def _(device):
    free, total = torch.cuda.mem_get_info()
    stats = torch.cuda.memory_stats()
    return [
        0 < free <= total, isinstance(free, int), _kind(torch.cuda.memory_summary()),
        all(k in stats for k in ("allocated_bytes.all.current", "reserved_bytes.all.peak", "num_ooms")),
    ]  # fmt: skip


# -- streams and events --------------------------------------------------------------------------------------------------


@case("streams/classes", [True, True, True, True, 0, "cuda:0"])
def _(device):
    s, d = torch.cuda.Stream(), torch.cuda.default_stream()
    return [
        isinstance(s, torch.cuda.Stream), isinstance(s, torch.Stream), s != d, torch.cuda.current_stream() == d,
        d.cuda_stream, str(s.device),
    ]  # fmt: skip


@case("streams/context", [True, True, True])
def _(device):
    s, outer = torch.cuda.Stream(), torch.cuda.current_stream()
    with torch.cuda.stream(s):
        inside = torch.cuda.current_stream() == s
    with s:
        again = torch.cuda.current_stream() == s
    return [inside, again, torch.cuda.current_stream() == outer]


@case("streams/order", [True, torch.arange(5.0) * 3])
def _(device):
    s = torch.cuda.Stream()
    x = torch.arange(5.0, device="cuda")
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        y = x * 3
        y.record_stream(s)
    torch.cuda.current_stream().wait_stream(s)
    s.synchronize()
    return [s.query(), y]


@case("streams/priority", ["tuple", True])
def _(device):
    low, high = torch.cuda.Stream.priority_range()
    return [_kind(torch.cuda.Stream.priority_range()), high <= low]


@case("streams/events", [True, True, "float", True])
def _(device):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    torch.ones(1000, device="cuda").sum()
    b.record()
    b.synchronize()
    took = a.elapsed_time(b)
    return [a.query(), b.query(), _kind(took), took >= 0]


@case(
    "streams/event without timing",
    Raises("RuntimeError", "Both events must be created with argument 'enable_timing=True'."),
)
def _(device):
    a, b = torch.cuda.Event(), torch.cuda.Event()
    a.record()
    b.record()
    a.elapsed_time(b)


@case(
    "streams/event not recorded",
    Raises("RuntimeError", "Both events must be recorded before calculating elapsed time."),
)
def _(device):
    torch.cuda.Event(enable_timing=True).elapsed_time(torch.cuda.Event(enable_timing=True))


@case("streams/unrecorded event is done", [True, True])
def _(device):
    e = torch.cuda.Event()
    return [e.query(), e.synchronize() is None]


@case("streams/words", ["<torch.cuda.Stream device=cuda:0 cuda_stream=0x0>", "<torch.cuda.Event uninitialized>"])
def _(device):
    return [repr(torch.cuda.default_stream()), repr(torch.cuda.Event())]


# -- random numbers ------------------------------------------------------------------------------------------------------


@case("random/seed gives the same numbers again", [True, True, False])
def _(device):
    def draw():
        return torch.randn(5, device="cuda"), torch.rand(3, device="cuda")

    torch.manual_seed(3)
    a = draw()
    torch.cuda.manual_seed(3)
    b = draw()
    torch.cuda.manual_seed_all(4)
    c = draw()
    return [torch.equal(x, y) for x, y in ((a[0], b[0]), (a[1], b[1]), (a[0], c[0]))]


@case("random/state", ["torch.uint8", [16], True, True])
def _(device):
    torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    a = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    b = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state_all([state])
    return [str(state.dtype), list(state.shape), torch.equal(a, b), torch.equal(b, torch.rand(4, device="cuda"))]


@case("random/fork", [True, False])
def _(device):
    torch.manual_seed(5)
    with torch.random.fork_rng():
        a = torch.rand(4, device="cuda")
    b = torch.rand(4, device="cuda")
    return [torch.equal(a, b), torch.equal(b, torch.rand(4, device="cuda"))]


@case("random/generator", ["cuda:0", 3, True, True, False])
def _(device):
    g = torch.Generator("cuda").manual_seed(3)
    seed = g.initial_seed()
    state = g.get_state()
    a = torch.randn(4, device="cuda", generator=g)
    g.set_state(state)
    b = torch.randn(4, device="cuda", generator=g)
    other = torch.Generator(device="cuda")
    other.manual_seed(3)
    same = torch.equal(torch.randn(4, device="cuda", generator=other), a)
    return [str(g.device), seed, torch.equal(a, b), same, torch.equal(a, torch.randn(4, device="cuda", generator=g))]


@case(
    "random/generator of the CPU", Raises("RuntimeError", "Expected a 'cuda' device type for generator but found 'cpu'")
)
def _(device):
    torch.randn(4, device="cuda", generator=torch.Generator())


@case("random/default generators", ["tuple", True, "cuda:0"])
def _(device):
    found = torch.cuda.default_generators
    return [_kind(found), len(found) == torch.cuda.device_count(), str(found[0].device)]


@case("random/state of a wrong size", Raises("RuntimeError", "RNG state is wrong size"))
def _(device):
    torch.cuda.set_rng_state(torch.zeros(3, dtype=torch.uint8))


@case("random/state of a wrong type", Raises("TypeError", "RNG state must be a torch.ByteTensor"))
def _(device):
    torch.cuda.set_rng_state(torch.zeros(16))


@case("random/dropout in a checkpointed segment", True)
def _(device):
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    x = torch.ones(64, device="cuda", requires_grad=True)
    y = checkpoint(lambda t: nn.functional.dropout(t * 2, 0.5), x, use_reentrant=False)
    y.sum().backward()
    return torch.equal((x.grad != 0), (y != 0))


# -- tensors -------------------------------------------------------------------------------------------------------------


@case("tensors/device", ["cuda:0", "cuda", 0, True, False, 0, "torch.cuda.FloatTensor", "torch.FloatTensor"])
def _(device):
    t = torch.ones(2, device="cuda")
    d = t.device
    return [str(d), d.type, d.index, t.is_cuda, t.is_cpu, t.get_device(), t.type(), t.cpu().type()]


@case(
    "tensors/words",
    [
        "tensor([1., 2.], device='cuda:0')",
        "tensor(3, device='cuda:0')",
        "tensor([], device='cuda:0', dtype=torch.int32)",
    ],
)
def _(device):
    return [
        repr(torch.tensor([1.0, 2.0], device="cuda")), repr(torch.tensor(3).cuda()),
        repr(torch.zeros(0, dtype=torch.int32, device="cuda")),
    ]  # fmt: skip


@case("tensors/words with a gradient", "tensor([2., 4.], device='cuda:0', grad_fn=<MulBackward0>)")
def _(device):
    return repr(torch.tensor([1.0, 2.0], device="cuda", requires_grad=True) * 2)


@case("tensors/parameter", "Parameter containing:\ntensor([1., 1.], device='cuda:0', requires_grad=True)")
def _(device):
    return repr(nn.Parameter(torch.ones(2, device="cuda")))


@case("tensors/every way there", ["cuda:0"] * 8)
def _(device):
    t, d = torch.ones(2), torch.device("cuda", 0)
    return [
        str(x.device)
        for x in (
            t.to("cuda"),
            t.to(d),
            t.to(0),
            t.cuda(),
            t.cuda(0),
            t.to(device="cuda:0"),
            t.to(t.cuda()),
            t.to("cuda", torch.float16),
        )
    ]


@case("tensors/every way back", [["cpu", torch.ones(2)]] * 4)
def _(device):
    t = torch.ones(2, device="cuda")
    return [[str(x.device), x] for x in (t.cpu(), t.to("cpu"), t.to(torch.ones(1)), torch.tensor(t.tolist()))]


@case("tensors/numpy", Raises(
    "TypeError", "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
))  # fmt: skip
def _(device):
    torch.ones(2, device="cuda").numpy()


@case("tensors/module keeps its parameters", [True, "cuda:0", True])
def _(device):
    m = nn.Linear(2, 2)
    before = m.weight
    moved = m.cuda()
    return [m.weight is before, str(m.weight.device), moved is m]


@case("tensors/like", ["cuda:0"] * 4)
def _(device):
    t = torch.ones(2, device="cuda")
    return [str(x.device) for x in (torch.zeros_like(t), t.new_zeros(3), t.new_tensor([1.0]), torch.randn_like(t))]


@case("tensors/pinned", [True, False, torch.ones(3)])
def _(device):
    t = torch.ones(3).pin_memory()
    return [t.is_pinned(), torch.ones(3).is_pinned(), t.to("cuda", non_blocking=True)]


# -- files ---------------------------------------------------------------------------------------------------------------


def _through_a_file(value, **kwargs):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **kwargs)


@case("files/map_location", ["cuda:0", "cpu", "cpu", "cuda:0", "cpu", "cuda:0"])
def _(device):
    t = torch.arange(3.0, device="cuda")
    ways = (None, "cpu", torch.device("cpu"), "cuda", {"cuda:0": "cpu"}, "cuda:0")
    return [str(_through_a_file(t, map_location=way).device) for way in ways]


@case("files/map_location by a function", ["cpu", ["cuda:0"]])
def _(device):
    seen = []

    def place(storage, location):
        seen.append(location)
        return storage

    return [str(_through_a_file(torch.ones(2, device="cuda"), map_location=place).device), seen]


@case("files/views share their storage", [True, torch.tensor([5.0, 1.0])])
def _(device):
    t = torch.ones(4, device="cuda")
    a, b = _through_a_file([t[:2], t[1:]])
    b[0] = 3
    a[0] = 5
    return [a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr(), torch.stack([a[0], b[1]])]


@case("files/to a missing device", ["RuntimeError", True])
def _(device):
    kind, text = _raised(lambda: _through_a_file(torch.ones(2, device="cuda"), map_location="cuda:7"))
    return [kind, text.startswith("Attempting to deserialize object on CUDA device 7 but torch.cuda.device_count() is")]


@case("files/pickle and copies", [["cuda:0", torch.arange(3.0)]] * 3)
def _(device):
    t = torch.arange(3.0, device="cuda")
    return [[str(x.device), x] for x in (pickle.loads(pickle.dumps(t)), copy.deepcopy(t), copy.copy(t))]  # noqa: S301  # scripts pickle tensors


@case("files/optimizer state", [["cuda:0"] * 4, ["cpu", "cpu"]])
def _(device):
    m = nn.Linear(2, 1).cuda()
    o = torch.optim.Adam(m.parameters())
    m(torch.ones(1, 2, device="cuda")).sum().backward()
    o.step()
    state = _through_a_file(o.state_dict())["state"]
    found = [str(v.device) for s in state.values() for v in (s["exp_avg"], s["exp_avg_sq"])]
    return [found, [str(s["step"].device) for s in state.values()]]


# -- refusals ------------------------------------------------------------------------------------------------------------


@case("mixed/operands", Raises(
    "RuntimeError", "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
))  # fmt: skip
def _(device):
    torch.ones(2, device="cuda") + torch.ones(2)


@case("mixed/scalars of the host", torch.full((2,), 3.0))
def _(device):
    return torch.ones(2, device="cuda") + torch.tensor(2.0)


@case("mixed/index of the host", torch.tensor([3.0, 1.0]))
def _(device):
    return torch.tensor([1.0, 2.0, 3.0], device="cuda")[torch.tensor([2, 0])]
