"""Flags of a form: the settings of CUDA's libraries hold during the call, and are restored after it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from wooly_executor.runtime.calls import library_call
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.runtime.invocation import flagged
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_executor.runtime.torch_private import SWITCHES
from wooly_wis.dtypes import DType
from wooly_wis.flags import SAYS
from wooly_wis.program import Form, Instruction, Operand, OperandRef, Program, Role, View

from services.executor.tests.fake_gpu import FakeDriver, gpu_runtime
from services.executor.tests.test_gpu_runtime import Side

M = View(DType.F32, (4, 4), (4, 1))
#: A device whose memory is not host memory.
GPU = TorchDevice(torch.device("cuda"))
REFS = tuple(map(OperandRef, range(4)))


class Spy(TorchDispatchMode):
    """Notes the settings at each call of an operator."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.setdefault(str(func), []).append(settings())
        return func(*args, **kwargs or {})


def settings():
    """The present value of every setting."""
    return {flag: switch.read() for flag, switch in SWITCHES.items()}


def expected(flags):
    """The values that the flags ask for, and the present values of the other settings. Two flags may share a setting."""
    found = settings()
    for flag in flags:
        shared = {flag}
        if flag.endswith(("_reduction", "_split_k")):
            shared = {flag[:8] + "reduction", flag[:8] + "split_k"}
        found |= dict.fromkeys(shared, SWITCHES[flag].value)
    return found


def extern(name, *operands, **attrs):
    return Form("extern", operands, (), tuple(sorted({"name": name, "kwargs": (), **attrs}.items())))


def product(*flags):
    attrs = (("args", REFS[:2]), *([("flags", flags)] if flags else []))
    return Form("mm", tuple(Operand(r, M) for r in (Role.IN, Role.IN, Role.OUT)), (), attrs)


def convolution(*flags):
    image, kernel, out = (View(DType.F32, (1, 1, n, n), (n * n, n * n, n, 1)) for n in (8, 3, 6))
    args = REFS[0], REFS[1], None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1
    operands = Operand(Role.IN, image), Operand(Role.IN, kernel), Operand(Role.OUT, out)
    return extern("aten.convolution.default", *operands, args=args, flags=flags)


def run(side, form):
    ready = side.ready(Program((form,), (Instruction(0, (0, 1, 2)),)))
    spy = Spy()
    sizes = [o.view.sizes for o in form.operands]
    generator = torch.Generator().manual_seed(3)
    with spy:
        buffers, outcome, *_ = side.run(
            ready.prepared, {k: torch.randn(s, generator=generator) for k, s in enumerate(sizes)}
        )
    assert outcome.failed_at is None, outcome
    return spy.seen, buffers[2].base.view(torch.float32)


@pytest.mark.parametrize(
    ("form", "operator", "flags"),
    [
        (product("matmul_tf32"), "aten.mm.default", {"matmul_tf32"}),
        (product("matmul_tf32", "no_bf16_reduction"), "aten.mm.default", {"matmul_tf32", "no_bf16_reduction"}),
        (
            convolution("cudnn_deterministic", "no_conv_tf32"),
            "aten.convolution.default",
            {"cudnn_deterministic", "no_conv_tf32"},
        ),
    ],
)
def test_flags_hold_during_the_call_on_a_gpu_and_have_no_effect_on_a_cpu(form, operator, flags):
    before = settings()
    on_gpu, ours = run(Side(gpu_runtime(FakeDriver())), form)
    on_cpu, theirs = run(Side(TorchCpuRuntime()), form)
    assert on_gpu[operator] == [expected(flags)] != [before] and on_cpu[operator] == [before]
    assert [seen for name, seen in on_gpu.items() if name != operator and seen != [before] * len(seen)] == []
    assert settings() == before and torch.equal(ours.flatten(), theirs.flatten())


@pytest.mark.parametrize("on_gpu", [True, False])
def test_calls_with_equal_flags_are_combined_and_others_are_not(on_gpu):
    """As in a script that sets TF32 for a part of its model."""
    asked = [("matmul_tf32",)] * 4 + [()] * 4
    alloc = Form("alloc", (Operand(Role.OUT, View(DType.U8, (64,), (1,))),))
    forms = (alloc, product("matmul_tf32"), product())
    body, made = [], [0, *range(3, 10)]  # slots are numbered by their first use; 1 and 2 are the inputs
    for k, flags in enumerate(asked):
        body += [Instruction(0, (made[k],)), Instruction(1 if flags else 2, (made[k - 1] if k else 1, 2, made[k]))]
    side = Side(gpu_runtime(FakeDriver(), hot=2) if on_gpu else TorchCpuRuntime(hot=2))
    ready, before = side.ready(Program(forms, tuple(body))), settings()
    ones = {k: torch.eye(4) + k for k in (1, 2)}
    first = None
    for _ in range(4):
        spy = Spy()
        with spy:
            buffers, outcome, *_ = side.run(ready.prepared, ones)
        assert outcome.failed_at is None and settings() == before
        found = buffers[9].base.view(torch.float32)
        first = found if first is None else first
        assert torch.equal(found, first)
        assert spy.seen["aten.mm.default"] == [expected(flags if on_gpu else ()) for flags in asked]
    assert len(ready.prepared.hot) == (2 if on_gpu else 1)


def test_flags_hold_during_the_backward_of_a_layer():
    """One GRU layer with the gradient of its input: the backward is not a part of the library call."""
    x, h, w, out = (View(DType.F32, s, torch.empty(s).stride()) for s in ((5, 2, 4), (1, 2, 4), (12, 4), (5, 2, 4)))
    operands = *[Operand(Role.IN, v) for v in (x, h, w, w, out)], Operand(Role.OUT, x)
    args = REFS[0], REFS[1], REFS[2:4], False, 1, 0.0, True, False, False
    vjp = (OperandRef(4), None)
    form = extern(
        "aten.gru.input", *operands, args=args, wanted=(REFS[0],), vjp=vjp, flags=("matmul_tf32", "no_rnn_tf32")
    )
    side, spy, before = Side(gpu_runtime(FakeDriver())), Spy(), settings()
    ready = side.ready(Program((form,), (Instruction(0, tuple(range(6))),)))
    with spy:
        _, outcome, *_ = side.run(ready.prepared, {k: torch.randn(o.view.sizes) for k, o in enumerate(operands)})
    assert outcome.failed_at is None, outcome
    wanted = expected({"matmul_tf32", "no_rnn_tf32"})
    backward = [seen for name, seen in spy.seen.items() if "backward" in name or name == "aten.mm.default"]
    assert backward and all(one == wanted for seen in backward for one in seen)
    assert settings() == before


@pytest.mark.parametrize("flag", SWITCHES)
def test_setting_is_restored_after_an_error(flag):
    before, wanted = settings(), expected({flag})

    def fail(frame):
        assert settings() == wanted
        raise ValueError

    form = product(flag)
    with pytest.raises(ValueError):
        flagged(fail, form, library_call(form), GPU)(None)
    assert settings() == before


def test_setting_that_was_changed_is_restored_if_the_next_one_fails(monkeypatch):
    def refuse(*value):
        if value == (True,):
            raise RuntimeError("no")

    monkeypatch.setitem(SWITCHES, "fp16_accumulation", SWITCHES["fp16_accumulation"]._replace(write=refuse))
    before = settings()
    form = product("cudnn_deterministic", "fp16_accumulation")
    call = flagged(lambda frame: None, form, library_call(form), GPU)
    with pytest.raises(RuntimeError, match="no"):
        call(None)
    assert settings() == before


def test_every_flag_has_a_setting():
    assert SWITCHES.keys() == SAYS.keys()
