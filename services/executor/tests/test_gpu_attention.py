"""Attention on a GPU: the choice of the operator, the arguments of fused operators, and products of matrices as the fallback."""

import math

import pytest
import torch
from wooly_executor.errors import OperationError
from wooly_executor.programs import ProgramStore
from wooly_executor.runtime import gpu_attention as subject
from wooly_executor.runtime.gpu_attention import Chip, Way, attention, attention_backward, choose
from wooly_executor.runtime.substitutes import substitute
from wooly_executor.runtime.torch_private import deterministic_switches, set_deterministic
from wooly_testkit.tape import Tape
from wooly_wis.codec import encode_program
from wooly_wis.dtypes import DType

from services.executor.tests.fake_gpu import FakeDriver, gpu_runtime

aten = torch.ops.aten
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
H100, A10, T4, MI300 = Chip("nvidia", 9, 0), Chip("nvidia", 8, 6), Chip("nvidia", 7, 5), Chip("amd", 9, 4)
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SQUARE = ((2, 4, 64, 64), (2, 4, 64, 64))
WIDE = ((2, 4, 64, 224), (2, 4, 64, 224))
OBLONG = ((2, 4, 3, 64), (2, 4, 64, 64))


@pytest.mark.parametrize(
    ("dtype", "shapes", "mask", "is_causal", "chip", "way"),
    [
        (F16, SQUARE, None, False, H100, Way.FLASH),
        (BF16, SQUARE, None, True, H100, Way.FLASH),
        (BF16, WIDE, None, True, H100, Way.FLASH),
        (BF16, WIDE, None, True, A10, Way.EFFICIENT),
        (BF16, ((2, 4, 64, 264),) * 2, None, False, H100, Way.EFFICIENT),
        (BF16, OBLONG, None, False, H100, Way.FLASH),
        (BF16, OBLONG, None, True, H100, Way.EFFICIENT),
        (BF16, SQUARE, BF16, False, H100, Way.EFFICIENT),
        (BF16, SQUARE, F32, False, H100, Way.EFFICIENT),
        (BF16, SQUARE, F16, False, H100, Way.MATMUL),
        (F32, SQUARE, None, True, H100, Way.EFFICIENT),
        (F32, SQUARE, torch.bool, False, H100, Way.EFFICIENT),
        (F64, SQUARE, None, False, H100, Way.MATMUL),
        (F16, SQUARE, None, False, T4, Way.EFFICIENT),
        (BF16, SQUARE, None, False, T4, Way.MATMUL),
        (BF16, ((2, 4, 0, 64), (2, 4, 64, 64)), None, False, H100, Way.MATMUL),
        (BF16, ((65536, 4, 8, 64),) * 2, None, False, H100, Way.MATMUL),
        (BF16, SQUARE, None, False, MI300, Way.MATMUL),
        (F32, SQUARE, None, False, None, Way.MATMUL),
    ],
)
def test_choose_dtype_shape_and_chip_decide_the_operator(dtype, shapes, mask, is_causal, chip, way):
    assert choose(dtype, *shapes, mask, is_causal, chip) is way


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("how", ["plain", "causal", "mask", "bias", "scaled", "grouped", "fully masked"])
def test_attention_by_matmul_matches_cpu_library(dtype, how):
    torch.manual_seed(1)
    shared = 2 if how == "grouped" else 4
    q, k, v = (torch.randn(2, h, n, 8).to(dtype) for h, n in ((4, 5), (shared, 7), (shared, 7)))
    mask = None
    if how == "mask":
        mask = torch.rand(2, 1, 5, 7) > 0.3
        mask[..., 0] = True
    elif how == "bias":
        mask = torch.randn(5, 7).to(dtype)
    elif how == "fully masked":
        mask = torch.zeros(5, 7, dtype=dtype)
        mask[2] = -math.inf
    given = mask
    if how == "mask":  # the library's kernel adds the mask, so its caller converts booleans
        given = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)
    scale = 0.7 if how == "scaled" else None
    out, logs = _FORWARD(q, k, v, 0.0, how == "causal", attn_mask=given, scale=scale)
    mine, mylogs = attention(q, k, v, 0.0, how == "causal", attn_mask=mask, scale=scale)
    near = {"atol": 2e-2, "rtol": 2e-2} if dtype is BF16 else {"atol": 2e-6, "rtol": 2e-5}
    torch.testing.assert_close(mine, out, **near)
    torch.testing.assert_close(mylogs, logs, **near)
    grad = torch.randn_like(out)
    theirs = _BACKWARD(grad, q, k, v, out, logs, 0.0, how == "causal", attn_mask=given, scale=scale)
    ours = attention_backward(grad, q, k, v, out, logs, 0.0, how == "causal", attn_mask=mask, scale=scale)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **near)


def test_attention_with_dropout_is_refused():
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(OperationError, match=r"dropout_p is 0\.5"):
        attention(q, q, q, 0.5)


def test_attention_of_tensors_of_several_dtypes_is_refused():
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(OperationError, match=r"tensors of one dtype"):
        attention(q, q.half(), q)
    with pytest.raises(OperationError, match=r"tensors of one dtype"):
        attention_backward(q, q, q, q, q.half(), torch.zeros(1, 1, 2), 0.0, False)


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("width", [64, 20])
@pytest.mark.parametrize("mask", [None, (5, 7), (2, 1, 1, 7), (2, 4, 5, 1)])
def test_attention_by_fused_operators_has_the_announced_shapes(monkeypatch, dtype, heads, width, mask):
    monkeypatch.setattr(subject, "_chip", lambda device: H100)
    with torch.device("meta"):
        q = torch.empty(2, 4, 5, width, dtype=dtype)
        k, v = (torch.empty(2, heads, 7, width, dtype=dtype) for _ in "kv")
        bias = None if mask is None else torch.empty(mask, dtype=dtype)
        out, logs = attention(q, k, v, attn_mask=bias)
        assert (out.shape, out.dtype) == (q.shape, dtype)
        assert (logs.shape, logs.dtype) == ((2, 4, 5), F32)
        grads = attention_backward(torch.empty_like(out), q, k, v, out, logs, 0.0, False, attn_mask=bias)
        assert [(g.shape, g.dtype) for g in grads] == [(t.shape, dtype) for t in (q, k, v)]


def test_attention_backward_gives_out_with_interleaved_heads(monkeypatch):
    """The memory-efficient kernel ignores the stride of the rows of `out`."""
    given = []

    def record(grad, q, k, v, bias, out, logs, *rest, **named):
        given.append((out, logs))
        return q, k, v, None

    class Operators:
        class _scaled_dot_product_efficient_attention_backward:
            default = staticmethod(record)

    monkeypatch.setattr(subject, "_chip", lambda device: H100)
    monkeypatch.setattr(subject, "aten", Operators)
    q = torch.randn(2, 4, 5, 12)
    logs = torch.randn(2, 5, 4).transpose(1, 2)
    attention_backward(q, q, q, q, q, logs, 0.0, False)
    ((out, padded),) = given
    assert out.transpose(1, 2).is_contiguous()
    assert torch.equal(out[..., :12], q)
    assert padded.shape == (2, 4, 32)
    assert padded.is_contiguous()
    assert torch.equal(padded[..., :5], logs)
    assert padded[..., 5:].isposinf().all()


def test_attention_backward_asked_for_determinism_switches_warnings_off():
    before = deterministic_switches()
    set_deterministic(on=True, warn_only=True, fill=False)
    try:
        assert subject._deterministic_if_asked(deterministic_switches)() == (True, False, False)
        assert deterministic_switches() == (True, True, False)
    finally:
        set_deterministic(*before)
    assert subject._deterministic_if_asked(deterministic_switches) is deterministic_switches


def test_aligned_odd_address_or_stride_is_copied():
    memory = torch.arange(4096, dtype=F16)
    good = memory[:1024].view(1, 2, 8, 64)
    assert subject._aligned(good) is good
    for bad in (memory[1:1025].view(1, 2, 8, 64), memory.as_strided((1, 2, 8, 64), (1032, 516, 65, 1))):
        own = subject._aligned(bad)
        assert own.is_contiguous()
        assert own.data_ptr() % 16 == 0
        assert torch.equal(own, bad)
    padded = subject._aligned(memory[:960].view(1, 2, 8, 60))
    assert padded.shape[-1] == 64
    assert not padded[..., 60:].any()


@pytest.mark.parametrize("shape", [(5, 7), (2, 1, 1, 7), (2, 4, 5, 1), (5, 16)])
def test_bias_rows_are_aligned_and_equal_to_the_mask(shape):
    columns = 16 if shape[-1] == 16 else 7
    q, k = torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, columns, 8)
    mask = torch.randn(shape)
    bias = subject._bias(mask, q, k)
    assert torch.equal(bias, mask.expand(2, 4, 5, columns))
    assert bias.stride(-1) == 1
    assert not any(n % subject.MASK_UNIT for n in bias.stride()[:-1])


def test_bias_of_booleans_is_minus_infinity_where_false():
    q = torch.zeros(1, 1, 1, 8, dtype=F16)
    bias = subject._bias(torch.tensor([[True, False]]), q, torch.zeros(1, 1, 2, 8))
    assert bias.dtype is F16
    assert bias.flatten().tolist() == [0.0, -math.inf]


def test_substitute_of_attention_needs_no_zeroed_memory():
    assert substitute(_FORWARD).writes_all
    assert substitute(_BACKWARD).writes_all


@pytest.fixture
def plans(monkeypatch):
    monkeypatch.setattr(subject, "_planned", set())
    monkeypatch.setattr(subject, "_unplannable", set())


@pytest.mark.usefixtures("plans")
def test_planned_call_that_failed_is_never_repeated():
    q, calls = torch.zeros(1, 2, 3, 8), []

    def fails():
        calls.append(1)
        raise RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.")

    assert subject.planned("forward", (q, q, q), False, fails) is None
    assert subject.planned("forward", (q.clone(), q, q), False, fails) is None
    assert len(calls) == 1
    assert subject.planned("forward", (q, q, q), True, lambda: "made") == "made"


@pytest.mark.usefixtures("plans")
def test_planned_call_without_memory_raises_and_is_not_repeated():
    q = torch.zeros(1, 2, 3, 8)

    def fails():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        subject.planned("forward", (q, q, q), False, fails)
    assert subject.planned("forward", (q, q, q), False, lambda: "made") is None


@pytest.mark.usefixtures("plans")
def test_planned_call_in_capture_needs_an_earlier_call(monkeypatch):
    q = torch.zeros(1, 2, 3, 8)
    monkeypatch.setattr(subject, "_in_capture", lambda: True)
    with pytest.raises(RuntimeError, match="before a graph can contain it"):
        subject.planned("forward", (q, q, q), False, lambda: "made")
    monkeypatch.setattr(subject, "_in_capture", lambda: False)
    subject.planned("forward", (q, q, q), False, lambda: "made")
    monkeypatch.setattr(subject, "_in_capture", lambda: True)
    assert subject.planned("forward", (q, q, q), False, lambda: "again") == "again"


def fake_operators(called, chosen):
    """CUDA's fused operators, computed by the CPU's. `called`: their names, in order. `chosen`: torch's own choice."""

    def by(name, more):
        def call(q, k, v, *rest, scale):
            called.append(name)
            mask = None if name == "flash" else rest[0]
            out, logs = _FORWARD(q, k, v, 0.0, rest[-2] if name == "flash" else rest[3], attn_mask=mask, scale=scale)
            return out, more(logs), None, None

        return type(name, (), {"default": staticmethod(call)})

    class Operators:
        _scaled_dot_product_flash_attention = by("flash", lambda logs: logs)
        _scaled_dot_product_cudnn_attention = by("cudnn", lambda logs: logs.unsqueeze(-1))
        _scaled_dot_product_efficient_attention = by("efficient", lambda logs: logs)
        _fused_sdp_choice = type("", (), {"default": staticmethod(lambda *args, **named: called.append("?") or chosen)})

    return Operators


@pytest.mark.parametrize(("name", "chosen"), [("cudnn", subject.CUDNN_CHOSEN), ("flash", 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_of_one_instruction_decides_once(monkeypatch, name, chosen, is_causal):
    called = []
    monkeypatch.setattr(subject, "_chip", lambda device: H100)
    monkeypatch.setattr(subject, "aten", fake_operators(called, chosen))
    for memory in ("_planned", "_unplannable"):
        monkeypatch.setattr(subject, memory, set())
    monkeypatch.setattr(subject, "_cudnn_is_chosen", {})
    mine = subject.Attention()
    for _ in range(3):
        q, k, v = (torch.randn(2, 4, 8, 16).to(BF16) for _ in range(3))
        for scale in (None, 0.5):
            out, logs = mine(q, k, v, 0.0, is_causal, scale=scale)
            want, wanted_logs = _FORWARD(q, k, v, 0.0, is_causal, scale=scale)
            assert torch.equal(out, want) and torch.equal(logs, wanted_logs)
    assert called == ["?", *[name] * 6]


def test_attention_of_one_instruction_copies_tensors_at_odd_addresses(monkeypatch):
    """Memory of another origin than torch's allocator, and pieces of the instruction, are computed as by `attention`."""
    called, given = [], []
    monkeypatch.setattr(subject, "_chip", lambda device: H100)
    monkeypatch.setattr(subject, "aten", fake_operators(called, 1))
    monkeypatch.setattr(subject, "_cudnn_is_chosen", {})
    monkeypatch.setattr(subject, "attention", lambda *args, **named: given.append(args) or attention(*args, **named))
    mine = subject.Attention()
    even = [torch.randn(2, 4, 8, 16).to(BF16) for _ in range(3)]
    odd = torch.empty(even[0].numel() + 1, dtype=BF16)[1:].view(even[0].shape).copy_(even[0])
    mine(*even)
    mine(*even)
    assert len(given) == 1
    out, _ = mine(odd, *even[1:])
    assert len(given) == 2 and torch.equal(out, mine(*even)[0])
    part = [t[:1] for t in even]
    assert torch.equal(mine(*part)[0], out[:1])


@pytest.mark.parametrize("shared", [1, 2, 4])
def test_masked_attention_of_one_instruction_decides_once(monkeypatch, shared):
    """As in a decode step: one row per head, and a mask that changes from run to run."""
    called, given = [], []
    monkeypatch.setattr(subject, "_chip", lambda device: H100)
    monkeypatch.setattr(subject, "aten", fake_operators(called, 1))
    monkeypatch.setattr(subject, "attention", lambda *args, **named: given.append(args) or attention(*args, **named))
    mine = subject.Attention()
    for _ in range(3):
        q, (k, v) = torch.randn(2, 4, 1, 16).to(BF16), (torch.randn(2, shared, 8, 16).to(BF16) for _ in "kv")
        for mask in (torch.rand(2, 1, 1, 8) > 0.5, torch.randn(2, 1, 1, 8).to(BF16), torch.randn(1, 8)):
            seen = mask
            if mask.dtype is torch.bool:
                mask[..., 0] = True
                seen = torch.zeros(mask.shape, dtype=BF16).masked_fill(~mask, -math.inf)
            if mask.dtype is F32:  # the operands are widened, so nothing is remembered
                mine(q, k, v, attn_mask=mask)
                continue
            out, logs = mine(q, k, v, attn_mask=mask)
            want, wanted_logs = _FORWARD(q, k, v, attn_mask=seen)
            torch.testing.assert_close(out, want, atol=1e-2, rtol=1e-2)
            torch.testing.assert_close(logs, wanted_logs)
    assert called == ["efficient"] * 9 and len(given) == 6


@pytest.mark.parametrize("logs_read", [False, True])
def test_masked_attention_is_cudnns_if_torch_chooses_it_and_nobody_reads_logarithms(monkeypatch, logs_read):
    called = []
    monkeypatch.setattr(subject, "_chip", lambda device: H100)
    monkeypatch.setattr(subject, "aten", fake_operators(called, subject.CUDNN_CHOSEN))
    for memory in ("_planned", "_unplannable"):
        monkeypatch.setattr(subject, memory, set())
    monkeypatch.setattr(subject, "_cudnn_is_chosen", {})
    mine = subject.Attention()
    mine.logs_read = logs_read
    for _ in range(3):
        q, k, v = (torch.randn(2, 4, n, 16).to(BF16) for n in (1, 8, 8))
        mask = torch.rand(2, 1, 1, 8) > 0.5
        mask[..., 0] = True
        out, logs = mine(q, k, v, attn_mask=mask)
        seen = torch.zeros(mask.shape, dtype=BF16).masked_fill(~mask, -math.inf)
        want, wanted_logs = _FORWARD(q, k, v, attn_mask=seen)
        torch.testing.assert_close(out, want, atol=1e-2, rtol=1e-2)
        assert logs is None or (logs_read and torch.allclose(logs, wanted_logs))
    # a mask in another dtype than the operands is not cuDNN's
    mine(q, k, v, attn_mask=torch.randn(1, 8))
    assert called == (["efficient"] * 4 if logs_read else ["?", *["cudnn"] * 3, "efficient"])


@pytest.mark.parametrize("freed", [False, True])
def test_attention_knows_whether_program_reads_logarithms(monkeypatch, freed):
    made = []
    real = subject.Attention
    monkeypatch.setattr("wooly_executor.runtime.substitutes.Attention", lambda: made.append(real()) or made[-1])
    t = Tape()
    q, k, v = (t.input(DType.F32, 1, 2, 4, 8) for _ in range(3))
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    _, logs = t.extern(name, q, k, v, 0.0, False, results=[(DType.F32, (1, 2, 4, 8)), (DType.F32, (1, 2, 4))])
    if freed:
        t.free(logs)
    program, _ = t.program()
    ProgramStore(gpu_runtime(FakeDriver())).define(encode_program(program))
    assert [one.logs_read for one in made] == [not freed]
