"""Every dtype that PyTorch's `op_db` lists for CUDA works on the device, also where the CPU has no kernel for it."""

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.bool: torch.uint8,
}
SAMPLES = 4
#: Kernels of CUDA that PyTorch's own functions call, and that the device does not have.
INTERNAL = {"torch.ops.aten._flash_attention_forward", "torch.ops.aten._efficient_attention_forward"}
#: Random numbers, and operators that the CPU has in no complex dtype: test_widening.py compares their values.
UNCOMPARED = {"nn.functional.rrelu", "nanmean", "nansum"}


def cast(a, before, dtype, device):
    """Move tensors to a device, and convert those of dtype `before`."""
    if isinstance(a, torch.Tensor):
        return a.to(device, dtype if a.dtype is before else None)
    if isinstance(a, (list, tuple)):
        return type(a)([cast(x, before, dtype, device) for x in a])
    return a


def values(t):
    return (torch.view_as_real(t.to(torch.complex64)) if t.is_complex() else t).double()


def test_dtypes_that_cuda_has_and_the_cpu_lacks_equal_the_wider_dtype(cuda):
    from torch.testing._internal.common_methods_invocations import op_db

    pairs = [(op, dtype) for op in op_db for dtype in sorted(op.dtypesIfCUDA - op.dtypes, key=str)]
    pairs = [(op, dtype) for op, dtype in pairs if op.full_name not in INTERNAL]
    assert len(pairs) > 90
    wrong = []
    for op, dtype in pairs:
        source = torch.complex64 if dtype.is_complex else torch.float32
        for sample in list(op.sample_inputs("cpu", source, requires_grad=False))[:SAMPLES]:
            narrow = cast((sample.input, *sample.args), source, dtype, "cpu")
            named = {k: cast(v, source, dtype, "cpu") for k, v in sample.kwargs.items()}
            wide = WIDER.get(dtype, torch.float64)
            try:
                found = op(*cast(narrow, None, None, cuda), **{k: cast(v, None, None, cuda) for k, v in named.items()})
                torch.cuda.synchronize()
                if op.full_name in UNCOMPARED:
                    continue
                expected = op(
                    *cast(narrow, dtype, wide, "cpu"), **{k: cast(v, dtype, wide, "cpu") for k, v in named.items()}
                )
                expected = expected.to(found.dtype)
                near = 0.6 if "conv" in op.full_name else 0.02  # sums of products in half precision
                torch.testing.assert_close(values(found.cpu()), values(expected), rtol=1e-2, atol=near, equal_nan=True)
            except Exception as e:
                wrong.append(f"{op.full_name} {dtype}: {type(e).__name__}: {str(e)[:300]}")
                break
    assert not wrong, "\n".join(wrong)
