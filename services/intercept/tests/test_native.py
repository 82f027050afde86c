"""Native kernels record what the kernels in Python record: the same programs, params, bindings and frees, byte for byte."""

import copy
import gc
import importlib
import threading
import types
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from wooly import device, native, storage
from wooly.early_reads import EarlyReads
from wooly.kernels.launch import ForeignKernel, Launches, Pointer
from wooly.origins import describe_origin, find_origin
from wooly.settings import Settings
from wooly_wis.codec import decode_program
from wooly_wis.dtypes import DType
from wooly_wis.foreign import Source

pytestmark = pytest.mark.skipif(native.module is None, reason=native.reason)


class Recorded:
    """Records with native kernels or without them, and keeps what is sent."""

    def __init__(self, monkeypatch):
        self.recorder = device.current().devices.recorders[0]
        self.frames = []
        gc.collect()
        torch.cuda.synchronize()
        self.kept = self.recorder.heap.live  # by other tests of this process, for example in caches
        link = self.recorder.link
        define, run = link.define, link.run

        def keep_define(raw):
            self.frames.append(("define", bytes(raw)))
            define(raw)

        def keep_run(digest, bind, params, frees, words, origins, reply=False):
            lines = [describe_origin(where) for where in origins]
            self.frames.append(("run", digest, tuple(bind), bytes(params), tuple(frees), reply, lines))
            return run(digest, bind, params, frees, words, origins, reply)

        monkeypatch.setattr(link, "define", keep_define)
        monkeypatch.setattr(link, "run", keep_run)
        monkeypatch.setattr(
            self.recorder, "try_flush", lambda: None
        )  # the timer cuts programs at other points each time

    def __call__(self, work, *, on):
        """What is sent while `work` runs, and its result. Each call starts with the same free ids and no known program."""
        recorder, heap = self.recorder, self.recorder.heap
        torch.cuda.synchronize()
        if heap.live != self.kept:
            gc.collect()
            torch.cuda.synchronize()
        assert heap.live == self.kept, "tensors of the last call live"
        heap._reusable.sort()
        recorder._sent.clear()
        recorder._end_forms.clear()
        recorder._kept_whole.clear()
        recorder.early_reads, recorder._early = EarlyReads(recorder._writes_of, recorder._extent_of), None
        recorder._without_end_form, recorder._closed_at_end_form = 0, None
        recorder.generator.manual_seed(0)
        recorder.set_limit(recorder.limit)
        heap.reset_peak()
        self.frames.clear()
        before = native.module.counts()[0]
        native.module.switch(on)
        try:
            result = work()
            torch.cuda.synchronize()
        finally:
            native.module.switch(True)
        self.natively = native.module.counts()[0] - before
        counted = (heap.live, heap.live_bytes, heap.held_bytes, heap.peak_bytes, heap.peak_live)
        return [*self.frames], result, counted


@pytest.fixture
def recorded(cuda, monkeypatch):
    """The function that records."""
    return Recorded(monkeypatch)


def assert_equal_recordings(recorded, work, calls=1):
    """Record `work` in Python until its plans are known, then natively, and compare."""
    for _ in range(2):
        recorded(work, on=False)
    expected = recorded(work, on=False)
    for _ in range(2):
        recorded(work, on=True)  # Python teaches its plans
    found = recorded(work, on=True)
    assert recorded.natively >= calls
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine == theirs
    assert found[1:] == expected[1:]


def forms_of(frames):
    """The forms of the programs that were sent."""
    return [form for frame in frames if frame[0] == "define" for form in decode_program(frame[1]).forms]


def bits(t):
    """The content of a tensor."""
    return t.detach().cpu().contiguous().view(torch.uint8).tolist()


def test_elementwise_and_products_equal(recorded):
    def work():
        x = torch.arange(16.0, device="cuda").view(4, 4)
        y = torch.ones(4, 4, device="cuda")
        for k in range(5):
            y = (x @ y + x * 0.5 - k).relu()
        return bits(y)

    assert_equal_recordings(recorded, work, calls=20)


def test_magnitudes_and_logic_are_one_instruction_each(recorded):
    def work():
        x = torch.arange(-8.0, 8.0, device="cuda").view(4, 4)
        far, odd = x.abs() > 3, x.logical_not()
        near = torch.logical_or(far, odd).logical_and(x.isfinite()).logical_xor_(odd)
        return bits(x.abs_() * near)

    assert_equal_recordings(recorded, work, calls=10)
    forms = forms_of(recorded(work, on=True)[0])
    assert {"abs", "logical_not", "logical_or", "logical_and", "logical_xor"} <= {form.opcode for form in forms}


def test_norms_and_dot_products_equal(recorded):
    def work():
        x = torch.arange(1.0, 17.0, device="cuda").view(4, 4)
        return bits(torch.linalg.vector_norm(x, dim=1) + x[0].dot(x[1]) + x.norm(p=1))

    assert_equal_recordings(recorded, work, calls=3)


def test_norms_in_training_and_masked_writes_equal(recorded):
    def work():
        x = torch.arange(12.0, device="cuda").view(4, 3)
        mean, var = torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")
        at = torch.tensor([2, 0], device="cuda")
        for _ in range(3):
            y = torch.nn.functional.batch_norm(x, mean, var, training=True)
            x = (x + y).masked_fill_(y < 0, 0.5).index_put_((at,), y[:2]).index_fill_(1, at, 2.0)
        return bits(x), bits(mean), bits(var)

    assert_equal_recordings(recorded, work, calls=18)


def test_write_over_part_of_operand_is_refused_after_same_call_on_other_memory(cuda):
    x, y = torch.arange(6.0, device="cuda"), torch.ones(6, device="cuda")
    before = native.module.counts()[0]
    for _ in range(4):
        x[1:].add_(y[:-1])
    assert native.module.counts()[0] > before
    with pytest.raises(RuntimeError, match="memory location"):
        x[1:].add_(x[:-1])
    assert x.tolist() == [0, 5, 6, 7, 8, 9]


def test_running_statistics_are_read_after_native_calls(cuda):
    x, mean, var = torch.full((4, 1), 3.0, device="cuda"), torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    seen = []
    for _ in range(5):
        torch.nn.functional.batch_norm(x, mean, var, training=True, momentum=0.5)
        seen.append(mean.item())
    assert seen == [1.5, 2.25, 2.625, 2.8125, 2.90625]


def test_norm_of_nothing_depends_on_order_after_known_calls(cuda):
    empty = torch.empty(0, device="cuda")
    for _ in range(4):
        assert torch.linalg.vector_norm(empty, 2).item() == 0
    with pytest.raises(RuntimeError, match="cannot compute"):
        torch.linalg.vector_norm(empty, torch.inf)


def test_views_and_in_place_operations_equal(recorded):
    def work():
        x = torch.arange(24.0, device="cuda").view(4, 6)
        x[1:3].mul_(2)
        x.t().add_(x.reshape(6, 4) * 1)
        x[:, 0] += x.sum(1)
        x.unsqueeze(0).expand(2, 4, 6).sum((0, 2)).sqrt_()
        return bits(x)

    assert_equal_recordings(recorded, work, calls=5)


def test_in_place_operation_updates_version_and_host_copy(cuda):
    for _ in range(3):
        x = torch.ones(3, device="cuda")
        total = x.sum()
        assert total.item() == 3 and total.item() == 3
        before = total._version
        total.add_(1)
        assert total._version == before + 1
        assert total.item() == 4


def test_training_steps_equal(recorded):
    torch.manual_seed(0)
    host = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    data = torch.randn(4, 6)

    def work():
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)).to("cuda")
        with torch.no_grad():
            for p, q in zip(model.parameters(), host.parameters(), strict=True):
                p.copy_(q)
        x = data.to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [bits(p) for p in model.parameters()]

    assert_equal_recordings(recorded, work, calls=30)


def test_inference_mode_makes_inference_tensors(cuda):
    x = torch.ones(2, 2, device="cuda")
    for _ in range(3):
        with torch.inference_mode():
            made = x + x
        assert made.is_inference() and not (x + x).is_inference()


def test_other_values_of_constants_are_other_calls(cuda):
    x = torch.arange(6.0, device="cuda").view(2, 3)
    for _ in range(4):
        assert x.sum(0).tolist() == [3, 5, 7] and x.sum(1).tolist() == [3, 12]
        assert x.sum(1, keepdim=True).shape == (2, 1)
        assert torch.add(x, x, alpha=2)[1, 2].item() == 15 and torch.add(x, x)[1, 2].item() == 10
        assert (x * 2)[0, 1].item() == 2 and (x * 2.5)[0, 1].item() == 2.5 and (x * True)[0, 1].item() == 1
        assert torch.sub(x, 1, alpha=3)[0, 0].item() == -3


def test_default_dtype_changes_results_of_known_calls(cuda):
    n = torch.arange(4, device="cuda")
    for _ in range(3):
        assert (n / 2).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        for _ in range(3):
            assert (n / 2).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert (n / 2).dtype is torch.float32


def test_wrong_arguments_raise_after_right_ones(cuda):
    x = torch.ones(2, 3, device="cuda")
    for _ in range(3):
        assert (x + x).shape == (2, 3)
        with pytest.raises(RuntimeError, match="must match"):
            x + torch.ones(4, 5, device="cuda")
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.zeros(2, 3)


def test_out_of_wrong_size_is_resized_at_each_call(cuda):
    x = torch.ones(2, 3, device="cuda")
    for _ in range(4):
        out = torch.empty(0, device="cuda")
        torch.add(x, x, out=out)
        assert out.tolist() == [[2, 2, 2], [2, 2, 2]]


def test_conjugate_views_are_resolved(cuda):
    x = torch.tensor([1 + 2j, 3 - 1j])
    y = x.to("cuda")
    for _ in range(3):
        assert torch.equal((y + y).cpu(), x + x)
        assert torch.equal((y.conj() + y).cpu(), x.conj() + x)


def test_remote_error_names_line_of_native_call(cuda):
    table, index = torch.zeros(3, device=cuda), torch.tensor([2], device=cuda)
    for i in (2, 2, 2, 7):
        index.fill_(i)
        found = table.index_select(0, index)  # this line is reported
    with pytest.raises(RuntimeError, match=r"index out of range.*\n.*test_remote_error_names_line_of_native_call"):
        found.cpu()


def test_no_room_for_result_raises_at_call(cuda):
    x = torch.ones(1024, device="cuda")
    for _ in range(3):
        x + x
    heap = storage.heaps[0]
    asked = []

    def make_room(nbytes):
        asked.append(nbytes)
        raise torch.OutOfMemoryError("no room")

    kept, heap.make_room = (heap.granted, heap.make_room), make_room
    heap.granted = heap.held_bytes
    try:
        with pytest.raises(torch.OutOfMemoryError):
            x + x
    finally:
        heap.granted, heap.make_room = kept
    assert asked == [4096]
    assert (x + x)[0].item() == 2


def test_observers_hear_of_native_storages(cuda):
    heard = []

    class Observer:
        def allocated(self, buffer, nbytes):
            heard.append(("allocated", nbytes))

        def freed(self, buffer, nbytes):
            heard.append(("freed", nbytes))

    x = torch.ones(256, device="cuda")
    for _ in range(3):
        x + x
    made = x + x
    observer, heap = Observer(), storage.heaps[0]
    live = heap.live
    heap.observe(observer)
    try:
        del made
        other = x + x
        del other
    finally:
        heap.observe(observer, on=False)
    assert heard == [("freed", 1024), ("allocated", 1024), ("freed", 1024)]
    assert heap.live == live - 1


def test_threads_record_at_once(cuda):
    results = {}

    def work(k):
        x = torch.full((8,), float(k), device="cuda")
        t = x
        for _ in range(200):
            t = t + x
        results[k] = t.tolist()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: [201.0 * k] * 8 for k in range(4)}


def test_thread_waits_for_lock_of_recorder(cuda):
    x = torch.ones(4, device="cuda")
    for _ in range(3):
        x + x
    recorder, found = device.current().devices.recorders[0], []
    with recorder.lock:
        thread = threading.Thread(target=lambda: found.append(x + x))
        thread.start()
        thread.join(0.2)
        assert not found
    thread.join()
    assert found[0].tolist() == [2] * 4


def test_error_of_hook_leaves_backward(cuda):
    x = torch.ones(3, device="cuda", requires_grad=True)
    for _ in range(3):
        y = x * 2
        y.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_copies_and_new_tensors_equal(recorded):
    def work():
        x = torch.arange(24.0, device="cuda").view(4, 6)
        half = x.to(torch.bfloat16)
        made = torch.empty_like(half, dtype=torch.float32)
        made.copy_(half)
        made[1:3].copy_(x[0])  # broadcast
        made[0].copy_(made[3])  # in one buffer
        turned = x.t().to(torch.float64, memory_format=torch.preserve_format)
        channels = torch.empty(1, 2, 2, 2, device="cuda", memory_format=torch.channels_last)
        channels.copy_(x[:2, :4].reshape(1, 2, 2, 2))
        empty = torch.empty(0, 3, device="cuda")
        number = torch.empty((), device="cuda").copy_(x[2, 2])[None]
        return [bits(t) for t in (half, made, turned, channels, empty, number, made.to(torch.bool))]

    assert_equal_recordings(recorded, work, calls=14)


def test_ranges_equal(recorded):
    def work():
        made = [
            torch.arange(*given, device="cuda")
            for given in ((5,), (3, 9), (0, 10, 3), (7, 7), (0,), (0.5, 3), (9, 2, -3))
        ]
        made += [torch.arange(4, device="cuda", dtype=dtype) for dtype in (torch.int64, torch.int32, torch.bfloat16)]
        return [(t.dtype, bits(t)) for t in made]

    assert_equal_recordings(recorded, work, calls=12)


def test_indexing_equal(recorded):
    def work():
        x = torch.arange(24.0, device="cuda").view(4, 6)
        rows, columns = torch.tensor([3, 0, 3]).to("cuda"), torch.tensor([1, 5, 2]).to("cuda")
        found = [x[rows], x[:, columns], x[rows, columns], x[rows, None], x[torch.tensor([1, 2])], x[x > 7]]
        x[rows, columns] = -1.0
        x[rows] = x[:3] * 2
        x.index_put_((rows, columns), torch.ones(3, device="cuda"), accumulate=True)
        x.masked_fill_(x > 20, 0.5).masked_fill_(x < 0, torch.tensor(2.0))
        x.masked_fill_(x == 4, x[0, 0])
        x.index_fill_(1, columns, 3)
        wide = torch.zeros(1, 6, device="cuda").expand(4, 6)
        with pytest.warns(UserWarning, match="expanded tensors is deprecated"):
            wide.masked_fill_(x > 3, 1.0)
        return [bits(t) for t in (*found, x, wide)]

    assert_equal_recordings(recorded, work, calls=14)


def test_layers_of_images_equal(recorded):
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Conv2d(3, 2, 1, bias=False)
    host, image = torch.nn.Sequential(*layers), torch.randn(2, 2, 6, 6)

    def work():
        model, x = copy.deepcopy(host).to("cuda"), image.to("cuda")
        model(x).sum().backward()
        with torch.no_grad():
            found = [model(x), model.eval()(x), model(x[:, :, :5])]
        return [bits(t[None]) for t in (*found, *[p.grad for p in model.parameters()], *model.buffers())]

    assert_equal_recordings(recorded, work, calls=8)


def test_traced_convolution_is_right_after_native_calls(cuda):
    layer, x = torch.nn.Conv2d(2, 3, 3).to("cuda"), torch.ones(1, 2, 5, 5, device="cuda")
    with torch.no_grad():
        expected = [layer(x) for _ in range(3)][-1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            traced = torch.jit.trace(layer, x)
        assert torch.equal(traced(x), expected) and torch.equal(traced(x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
def test_numbers_in_host_tensors_equal(recorded, dtype):
    def work():
        x = torch.arange(6.0, device="cuda").to(torch.bfloat16)
        for value in (0.1, 3, -7.3):
            x = torch.where(x > torch.tensor(value, dtype=dtype), x * torch.tensor(value, dtype=dtype), x)
        return bits(x)

    assert_equal_recordings(recorded, work, calls=9)


def test_wrong_ranges_raise_after_right_ones(cuda):
    for _ in range(3):
        assert torch.arange(2, 5, device="cuda").tolist() == [2, 3, 4]
        with pytest.raises(RuntimeError, match="inconsistent with step sign"):
            torch.arange(5, 2, device="cuda")
        with pytest.raises(RuntimeError, match="must be nonzero"):
            torch.arange(2, 5, 0, device="cuda")


def test_linear_of_parameters_without_gradients_equal(recorded):
    torch.manual_seed(0)
    host = torch.nn.Linear(6, 5)

    def work():
        layer, x = copy.deepcopy(host).to("cuda"), torch.arange(48.0, device="cuda").view(2, 4, 6)
        with torch.no_grad():
            folded, split = layer(x), layer(x.transpose(0, 1))  # the second one is no matrix in memory
        return [bits(t) for t in (folded, split)]

    assert_equal_recordings(recorded, work, calls=2)


def test_norms_and_recurrent_cells_without_gradients_equal(recorded):
    torch.manual_seed(0)
    norm, cell = torch.nn.RMSNorm(8).cuda(), torch.nn.LSTMCell(8, 8).cuda()
    gru, rnn = torch.nn.GRUCell(8, 8).cuda(), torch.nn.RNNCell(8, 8).cuda()
    torch.cuda.synchronize()
    recorded.kept = recorded.recorder.heap.live  # the parameters

    def work():
        x = torch.arange(24.0, device="cuda").view(3, 8)
        with torch.no_grad():
            for _ in range(3):
                h, c = cell(norm(x))
                x = rnn(gru(h, c))
        return bits(x)

    assert_equal_recordings(recorded, work, calls=12)


def test_modes_transforms_and_gradients_see_operators_after_native_calls(cuda):
    weight = torch.full((8,), 2.0, device="cuda", requires_grad=True)
    x = torch.arange(24.0).view(3, 8)
    on_device = x.cuda()

    def norm(a, w):
        return torch.nn.functional.rms_norm(a, (8,), w)

    expected = norm(x, weight.detach().cpu())
    for _ in range(3):
        with torch.no_grad():
            found = norm(on_device, weight)
        assert not found.requires_grad and torch.equal(found.cpu(), expected)
    with Named() as names, torch.no_grad():
        norm(on_device, weight)
    assert "aten.rsqrt.default" in names.found
    batched = torch.func.vmap(norm, in_dims=(0, None))(on_device, weight.detach())
    torch.testing.assert_close(batched.cpu(), expected)
    gradient = torch.func.grad(lambda w: norm(on_device, w).sum())(weight.detach())
    norm(on_device, weight).sum().backward()
    torch.testing.assert_close(weight.grad, gradient)


INFINITE = [1.0, float("inf"), -float("inf"), 0.0]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_tangent_of_constant_is_zero_times_infinite_numbers(cuda):
    x, constant = torch.tensor(INFINITE, device=cuda), torch.tensor([2.0, 3.0, 4.0, 5.0], device=cuda)
    for function, tangent in (
        (lambda a: a * constant, constant),
        (lambda a: a / constant, 1 / constant),
        (lambda a: a - constant, torch.ones(4, device=cuda)),
    ):
        value, found = torch.func.jvp(function, (x,), (torch.ones_like(x),))
        assert torch.equal(value, function(x)) and torch.equal(found, tangent)
    assert torch.equal(torch.func.jacfwd(lambda a: a * constant)(x), constant.diag())


def test_zero_tensor_is_zeros_for_each_operator(cuda):
    zero, x = torch._efficientzerotensor((2, 4), device="cuda"), torch.arange(8.0, device="cuda").view(2, 4)
    assert zero._is_zerotensor() and zero.device == x.device and zero.t()._is_zerotensor()
    expected = torch.zeros(2, 4)
    for found in (zero, zero.clone(), zero.cpu(), zero.sin(), zero.t().contiguous().t(), zero.half().float()):
        assert torch.equal(found.cpu(), expected)
    assert torch.equal(torch.ones(2, 4, device="cuda").copy_(zero).cpu(), expected)
    assert torch.equal(torch.zeros(2, 4).copy_(zero), expected)
    assert torch.equal(x.clone().copy_(torch._efficientzerotensor((2, 4))).cpu(), expected)
    assert (
        zero[0, 0].item() == 0
        and torch.equal(zero + x, x)
        and torch.equal(torch.mm(zero, x.t()).cpu(), torch.zeros(2, 2))
    )
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        zero.add_(1)
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        zero.copy_(x)


@pytest.mark.parametrize("other", ["x", "weight"])
def test_zero_tensor_is_zeros_for_operators_recorded_as_one(cuda, other):
    def results(zero):
        x = torch.arange(12.0, device=zero.device).view(1, 1, 3, 4)
        a, b = (zero, x) if other == "x" else (x, zero)
        yield torch.nn.functional.linear(a[0, 0], b[0, 0])
        yield torch.nn.functional.rms_norm(a, (4,), b[0, 0, 0])
        yield torch.nn.functional.scaled_dot_product_attention(a, b, a)
        yield torch.nn.functional.cross_entropy(a[0, 0], b[0, 0], label_smoothing=0.1)

    found = list(results(torch._efficientzerotensor((1, 1, 3, 4), device="cuda")))
    for one, expected in zip(found, results(torch.zeros(1, 1, 3, 4, device="cuda")), strict=True):
        assert torch.equal(one, expected)


class Named(TorchDispatchMode):
    """Keeps the names of the operators that it sees."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gradients", [False, True])
def test_attention_equal_with_and_without_switches(recorded, gradients):
    def work():
        made = torch.arange(2 * 4 * 3 * 8.0, device="cuda").view(2, 4, 3, 8) / 100
        mask = torch.ones(3, 3, device="cuda").tril().log()
        q, k = made.clone().requires_grad_(gradients), made[:, :2].clone().requires_grad_(gradients)
        attend = torch.nn.functional.scaled_dot_product_attention
        found = [attend(q, k, k, is_causal=True, enable_gqa=True), attend(q, q, q, attn_mask=mask, scale=0.5)]
        found.append(attend(q, q, q, attn_mask=mask > -1))
        half = made.to(torch.bfloat16)
        found.append(attend(half, half, half, attn_mask=mask > -1))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            found.append(attend(q, k, k, is_causal=True, enable_gqa=True))
        if gradients:
            sum([t.sum() for t in found]).backward()
            found += [q.grad, k.grad]
        return [bits(t) for t in found]

    assert_equal_recordings(recorded, work, calls=5)


def test_copy_over_part_of_itself_is_refused_after_same_copy_between_tensors(cuda):
    x, y = torch.arange(6.0, device="cuda"), torch.arange(6.0, device="cuda")
    for _ in range(3):
        x[:4].copy_(y[1:5])
        with pytest.raises(RuntimeError, match="single memory location"):
            x[:4].copy_(x[1:5])
    assert x.tolist() == [1, 2, 3, 4, 4, 5]


def test_known_factory_fills_memory_while_algorithms_are_deterministic(cuda):
    for _ in range(3):
        assert torch.empty(3, device="cuda").tolist() == [0, 0, 0]
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            assert torch.empty(3, device="cuda").isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.empty(3, device="cuda").tolist() == [0, 0, 0]


def test_known_factory_follows_default_dtype(cuda):
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            assert [torch.empty(3, device="cuda").dtype for _ in range(3)] == [dtype] * 3
        finally:
            torch.set_default_dtype(torch.float32)


def test_calls_are_native_while_no_freed_id_can_be_used_again(cuda):
    x = torch.ones(5, 7, device="cuda")
    for _ in range(3):
        x + x
    gc.collect()
    torch.cuda.synchronize()  # what was freed before can be used again now, and not during the test
    heap = storage.heaps[0]
    kept, heap._reusable[:] = [*heap._reusable], []
    first, before = heap._next, native.module.counts()[0]
    try:
        made = [x + x for _ in range(4)]
    finally:
        heap._reusable.extend(kept)
    assert native.module.counts()[0] == before + 4
    assert [storage.address_of(t) >> storage.ID_SHIFT for t in made] == [(first + k) << 3 for k in range(1, 5)]
    assert heap._next == first + 4


def test_origins_equal_those_of_python(cuda):
    def inner():
        return [(native.module.origin(depth), find_origin(depth)) for depth in (1, 2, 3)]

    def outer():
        return inner()

    library = types.FunctionType(
        outer.__code__.replace(co_filename=f"{torch.__path__[0]}/made.py"), {}, closure=outer.__closure__
    )
    for pairs in (outer(), library()):
        for mine, theirs in pairs:
            assert mine[0] is theirs[0] and abs(mine[1] - theirs[1]) <= 40  # the calls stand in one line
    assert native.module.origin(10_000)[0].co_name == find_origin(10_000)[0].co_name


def test_arguments_of_launches_equal_those_of_python(cuda):
    pointer, kinds = Pointer(DType.F32), (DType.I32, DType.U64, DType.F32)
    kernel = ForeignKernel(Source("ttir", "text"), "f", (pointer, pointer, *kinds, pointer))
    x = torch.zeros(40, device="cuda")
    for args in (
        (x, x[3:], 1, 2, 3.5, None),
        (x[:0], x.view(4, 10).t(), True, (1 << 64) - 1, 0.0, x[8:]),
        (None, None, -1, 0, 1.0, None),
        (torch.nn.Parameter(x), x, 1, 1 << 63, 2, x.view(torch.int32)),
    ):
        found = [], [], []
        expected = [], [], []
        assert native.module.collect_launch(kernel.kinds, args, *found)
        Launches._collect(kernel, args, *expected)
        assert found == expected
    for wrong in (
        (torch.zeros(3), x, 1, 2, 3.0, x),
        (x, x, 1, 2, 3.0, 7),
        (x, x, 1, 2.0, 3.0, x),
        (x, x, 1),
        (x.conj(), 1) * 3,
    ):
        found = [], [], []
        assert not native.module.collect_launch(kernel.kinds, wrong, *found)
        assert found == ([], [], [])


def test_setting_on_without_module_is_refused(monkeypatch):
    from wooly.errors import WoolyError

    monkeypatch.setattr(native, "module", None)
    with pytest.raises(WoolyError, match="WOOLYAI_NATIVE=on"):
        native.switch("on")
    assert Settings(native="off").native == "off"


# -- random sequences ------------------------------------------------------------------------------------------------------

#: Operations on a pool of tensors of shape (4, 4). Each takes the pool and three numbers.
OPERATIONS = (
    lambda p, a, b, k: p.append(p[a] + p[b]),
    lambda p, a, b, k: p.append(p[a] * (k / 4)),
    lambda p, a, b, k: p.append(p[a] - k),
    lambda p, a, b, k: p.append(torch.add(p[a], p[b], alpha=k)),
    lambda p, a, b, k: p.append(p[a] @ p[b]),
    lambda p, a, b, k: p.append(torch.addmm(p[a], p[b], p[a], beta=0.5)),
    lambda p, a, b, k: p.append(p[a].t()),
    lambda p, a, b, k: p.append(p[a].relu()),
    lambda p, a, b, k: p.append(p[a].sum(k % 2, keepdim=True).expand(4, 4)),
    lambda p, a, b, k: p.append(torch.cat([p[a][:2], p[b][2:]])),
    lambda p, a, b, k: p.append(torch.where(p[a] > p[b], p[a], p[b])),
    lambda p, a, b, k: p.append(p[a].clamp(-k, k)),
    lambda p, a, b, k: p.append(p[a].to(torch.float64).to(torch.float32)),
    lambda p, a, b, k: p.append(p[a].max(k % 2, keepdim=True).values.expand(4, 4)),
    lambda p, a, b, k: p.append(torch.softmax(p[a], k % 2)),
    lambda p, a, b, k: p[a].contiguous().add_(p[b]),
    lambda p, a, b, k: p[a][k % 4].mul_(0.5) if p[a].stride(1) else None,
    lambda p, a, b, k: p[a].fill_(k) if p[a].is_contiguous() else None,
    lambda p, a, b, k: torch.mul(p[b], p[b], out=p[a]) if p[a].is_contiguous() and a != b else None,
    lambda p, a, b, k: p.pop(a) if len(p) > 3 else None,
    lambda p, a, b, k: p.append(p[a].new_full((4, 4), float(p[b][0, 0].item() > k))),
    lambda p, a, b, k: p.append(p[a].clone()),
    lambda p, a, b, k: p.append(torch.zeros_like(p[a])),
    lambda p, a, b, k: p.append(torch.empty_like(p[a], dtype=torch.bfloat16).copy_(p[b]).float()),
    lambda p, a, b, k: p[a].copy_(p[b][k % 4]) if p[a].is_contiguous() and a != b else None,
    lambda p, a, b, k: p[a][:2].copy_(p[a][2:]) if p[a].is_contiguous() else None,
    lambda p, a, b, k: (
        p.append(torch.nn.functional.scaled_dot_product_attention(*[p[b].view(1, 1, 4, 4)] * 3)[0, 0])
        if p[b].is_contiguous()
        else None
    ),
)
SEQUENCES = st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), *[st.integers(0, 7)] * 3), min_size=1, max_size=40)


def run_sequence(sequence):
    """Run a sequence of operations. Returns the bits of all tensors."""
    pool = [torch.arange(16.0, device="cuda").view(4, 4) / 16, torch.ones(4, 4, device="cuda")]
    for which, a, b, k in sequence:
        OPERATIONS[which](pool, a % len(pool), b % len(pool), k)
    return [bits(t) for t in pool]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SEQUENCES)
def test_random_sequence_equals_python(recorded, sequence):
    assert_equal_recordings(recorded, lambda: run_sequence(sequence), calls=0)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SEQUENCES)
def test_random_gradients_equal_python(recorded, sequence):
    pure = [s for s in sequence if s[0] < 15]

    def work():
        x = (torch.arange(16.0, device="cuda").view(4, 4) / 16).requires_grad_()
        w = torch.ones(4, 4, device="cuda", requires_grad=True)
        pool = [x * 1, w * 1]
        for which, a, b, k in pure:
            OPERATIONS[which](pool, a % len(pool), b % len(pool), k)
        sum([t.sum() for t in pool]).backward()
        return [bits(x.grad), bits(w.grad)]

    assert_equal_recordings(recorded, work, calls=1)


def test_sources_that_changed_since_the_build_are_noticed(tmp_path):
    digest = importlib.import_module("wooly_native._sources").digest
    package = tmp_path / "wooly_native"
    package.mkdir()
    assert digest(package) is None  # as in a wheel
    (tmp_path / "src/other").mkdir(parents=True)
    (tmp_path / "src/module.py").touch()
    assert digest(package) is None  # another distribution's folder
    source = tmp_path / "src/kernel.cpp"
    source.write_text("int one;")
    before = digest(package)
    source.write_text("int two;")
    assert before != digest(package)
    assert not importlib.import_module("wooly_native").is_outdated()
