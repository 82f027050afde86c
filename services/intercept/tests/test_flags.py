"""Flags of CUDA's libraries: a form has the flags that the script has set, if its operator and dtypes follow them."""

import warnings

import pytest
import torch
from torch.nn import functional
from wooly.device import current

from services.intercept.tests.test_determinism import forms_of

MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


@pytest.fixture(autouse=True)
def _defaults_after():
    yield
    torch.backends.fp32_precision = CUDNN.fp32_precision = "none"
    MATMUL.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    MATMUL.fp32_precision = "none"
    CUDNN.allow_tf32 = True
    CUDNN.deterministic = CUDNN.benchmark = False
    MATMUL.allow_fp16_reduced_precision_reduction = MATMUL.allow_bf16_reduced_precision_reduction = True
    MATMUL.allow_fp16_accumulation = False
    assert current().flags.current == ()


def _set(owner, name):
    def to(value):
        setattr(owner, name, value)

    return to


@pytest.mark.parametrize(
    ("switch", "value", "flags"),
    [
        (_set(MATMUL, "allow_tf32"), True, ("matmul_tf32",)),
        (_set(MATMUL, "fp32_precision"), "tf32", ("matmul_tf32",)),
        (torch.set_float32_matmul_precision, "high", ("matmul_tf32",)),
        (torch.set_float32_matmul_precision, "medium", ("matmul_tf32",)),
        (torch.set_float32_matmul_precision, "highest", ()),
        (_set(torch.backends, "fp32_precision"), "tf32", None),
        (_set(CUDNN, "allow_tf32"), False, ("no_conv_tf32", "no_rnn_tf32")),
        (_set(CUDNN, "allow_tf32"), True, ()),
        (_set(CUDNN.conv, "fp32_precision"), "ieee", ("no_conv_tf32",)),
        (_set(CUDNN.rnn, "fp32_precision"), "ieee", ("no_rnn_tf32",)),
        (_set(CUDNN, "deterministic"), True, ("cudnn_deterministic",)),
        (_set(CUDNN, "benchmark"), True, ()),
        (_set(MATMUL, "allow_fp16_reduced_precision_reduction"), False, ("no_fp16_reduction",)),
        (_set(MATMUL, "allow_fp16_reduced_precision_reduction"), (False, False), ("no_fp16_split_k",)),
        (_set(MATMUL, "allow_bf16_reduced_precision_reduction"), False, ("no_bf16_reduction",)),
        (_set(MATMUL, "allow_bf16_reduced_precision_reduction"), (False, False), ("no_bf16_split_k",)),
        (_set(MATMUL, "allow_fp16_accumulation"), True, ("fp16_accumulation",)),
    ],
)
def test_switch_sets_the_flags_at_once(cuda, switch, value, flags):
    switch(value)
    if flags is None:  # the parent of all precisions: the parts that were not set follow it
        flags = ("matmul_tf32",) if MATMUL.fp32_precision == "tf32" else ()
    assert current().flags.current == flags


def test_switch_that_raises_leaves_the_flags_of_pytorch(cuda):
    with pytest.raises(RuntimeError):
        MATMUL.fp32_precision = "bf16"
    assert current().flags.current == ()


def test_context_manager_restores_the_flags(cuda):
    with CUDNN.flags(enabled=True, deterministic=True, allow_tf32=False):
        assert not CUDNN.allow_tf32 and CUDNN.deterministic
        assert current().flags.current == ("cudnn_deterministic", "no_conv_tf32", "no_rnn_tf32")
    assert CUDNN.allow_tf32 and not CUDNN.deterministic and current().flags.current == ()


def test_values_are_read_back_as_they_were_set(cuda):
    MATMUL.allow_tf32, CUDNN.allow_tf32 = True, False
    assert MATMUL.allow_tf32 and not CUDNN.allow_tf32 and torch.get_float32_matmul_precision() == "high"
    MATMUL.allow_bf16_reduced_precision_reduction = False
    assert not MATMUL.allow_bf16_reduced_precision_reduction


def _calls(device):
    x, w = torch.randn(3, 7, device=device), torch.randn(7, 7, device=device)
    half, image = x.half(), torch.randn(1, 2, 9, 9, device=device)
    kernel = torch.randn(2, 2, 3, 3, device=device)
    rnn = torch.nn.GRU(7, 5).to(device)
    return {
        "mm": lambda: x @ w,
        "addmm": lambda: torch.addmm(w[0], x, w),
        "half": lambda: half @ w.half(),
        "conv": lambda: functional.conv2d(image, kernel),
        "gru": lambda: rnn(x),
        "relu": lambda: x.relu(),
    }


def test_form_has_the_flags_that_concern_its_operator_and_dtypes(cuda):
    calls = _calls(cuda)
    plain = {name: forms_of(call) for name, call in calls.items()}
    assert not any(b"flags" in raw for forms in plain.values() for raw in forms.values())
    torch.set_float32_matmul_precision("high")
    CUDNN.allow_tf32, CUDNN.deterministic = False, True
    flagged = {name: b"".join(forms_of(call).values()) for name, call in calls.items()}
    expected = {
        "mm": [b"matmul_tf32"],
        "addmm": [b"matmul_tf32"],
        "half": [],
        "conv": [b"cudnn_deterministic", b"no_conv_tf32"],
        "gru": [b"matmul_tf32", b"no_rnn_tf32"],
        "relu": [],
    }
    every = {word for words in expected.values() for word in words}
    assert {name: sorted(word for word in every if word in raw) for name, raw in flagged.items()} == expected
    MATMUL.allow_fp16_reduced_precision_reduction = False
    assert b"no_fp16_reduction" in b"".join(forms_of(calls["half"]).values()) and not forms_of(calls["mm"])


def test_native_product_keeps_its_opcode_with_flags(cuda):
    x = torch.randn(5, 11, device=cuda)
    torch.set_float32_matmul_precision("high")
    forms = forms_of(lambda: x @ x.T)
    assert "mm" in forms and b"matmul_tf32" in forms["mm"], forms


def test_plans_of_both_settings_are_used_again_in_a_loop(cuda):
    x, image, kernel = (torch.randn(s, device=cuda) for s in ((6, 6), (1, 1, 8, 8), (1, 1, 3, 3)))

    def step():
        for on in (False, True):
            MATMUL.allow_tf32 = CUDNN.allow_tf32 = on
            x @ x
            functional.conv2d(image, kernel)

    step()
    planned = len(current().generic._plans)
    forms = forms_of(step)
    assert not forms and len(current().generic._plans) == planned


def test_gradient_of_a_convolution_follows_the_flags_of_its_backward(cuda):
    image, kernel = torch.randn(1, 2, 7, 7, device=cuda), torch.randn(2, 2, 3, 3, device=cuda, requires_grad=True)
    result = functional.conv2d(image, kernel).sum()
    with CUDNN.flags(enabled=True, allow_tf32=False):
        forms = forms_of(result.backward)
    assert b"no_conv_tf32" in forms["aten.convolution_backward.default"]


@pytest.mark.parametrize("tf32", [False, True])
def test_convolution_with_flags_of_its_own_ignores_those_of_the_process(cuda, tf32):
    image, kernel = torch.randn(1, 2, 6, 6, device=cuda), torch.randn(2, 2, 3, 3 - tf32, device=cuda)
    CUDNN.allow_tf32 = not tf32
    lists = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    forms = forms_of(lambda: torch._convolution(image, kernel, None, *lists, False, not tf32, True, tf32))
    raw = forms["aten.convolution.default"]
    assert (b"no_conv_tf32" in raw) == (b"cudnn_deterministic" in raw) == (not tf32)


def test_traced_convolution_keeps_the_flags_of_the_trace(cuda):
    layer = torch.nn.Conv2d(2, 3, 3).to(cuda)
    image = torch.randn(1, 2, 10, 10, device=cuda)
    with CUDNN.flags(enabled=True, allow_tf32=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(layer, image)
    larger = torch.randn(1, 2, 12, 12, device=cuda)
    forms = forms_of(lambda: traced(larger))
    assert b"no_conv_tf32" in forms["aten.convolution.default"]
    assert torch.equal(traced(larger), layer(larger))


def test_results_on_a_cpu_executor_do_not_depend_on_flags(cuda):
    calls = _calls(cuda)
    before = [call() for call in calls.values()]
    torch.set_float32_matmul_precision("high")
    CUDNN.allow_tf32, CUDNN.deterministic, MATMUL.allow_fp16_accumulation = False, True, True
    for one, other in zip(before, [call() for call in calls.values()], strict=True):
        one, other = (t[0] if isinstance(t, tuple) else t for t in (one, other))
        assert torch.equal(one, other)
