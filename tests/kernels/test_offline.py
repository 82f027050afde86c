"""The text that a launch sends is also what other chips' compilers take: compiled for them here, run on none."""

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
import torch  # noqa: E402

from tests.kernels import triton_kernels as kernels  # noqa: E402

TARGETS = {"sm_90": ("cuda", 90, 32, "cubin"), "gfx942": ("hip", "gfx942", 64, "hsaco")}


def captured(name):
    """The text of a launch of one of our kernels."""
    x, ints = torch.ones(64, 64, device="cuda"), torch.tensor([0, 32, 64], dtype=torch.int32, device="cuda")
    w = torch.ones(64, device="cuda")
    locks = torch.zeros(8, dtype=torch.int32, device="cuda")
    square = (x, x, torch.empty_like(x), 64, 64, 64, 64, 1, 64, 1, 64, 1)
    compiled = {
        "add": lambda: kernels.add_kernel[(1,)](x, x, torch.empty_like(x), 64, BLOCK=128),
        "softmax": lambda: kernels.softmax_kernel[(64,)](torch.empty_like(x), x, 64, 64, BLOCK=64),
        "matmul": lambda: kernels.matmul_kernel.fn.fn[(1,)](*square, BM=64, BN=64, BK=32, EVEN=True),
        "layer norm": lambda: kernels.layer_norm_forward[(64,)](
            x, w, w, torch.empty_like(x), w, w, 64, 64, 1e-5, BLOCK=64
        ),
        "layer norm's gradient": lambda: kernels.layer_norm_backward[(64,)](
            torch.empty_like(x), x, x.clone(), x.clone(), x, w, w, w, locks, 64, 64, GROUPS=4, BLOCK=64
        ),
        "dropout": lambda: kernels.dropout_kernel[(8,)](x, torch.empty_like(x), 4096, 0.5, 7, BLOCK=512),
        "attention": lambda: kernels.attention_kernel[(2, 1)](
            x, x, x, torch.empty_like(x), 0.1, 4096, 64, 64, D=64, BM=32, BN=32, CAUSAL=True
        ),
        "grouped gemm": lambda: kernels.grouped_gemm_kernel[(2,)](
            x, x, torch.empty_like(x), ints, 1, 64, 64, BM=16, BN=32, BK=16
        ),
    }[name]()
    torch.cuda.synchronize()
    return compiled.asm["ttir"].decode()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name", ["add", "softmax", "matmul", "layer norm", "layer norm's gradient", "dropout", "attention", "grouped gemm"]
)
@pytest.mark.slow
def test_captured_texts_compile_for_other_chips(gpu, tmp_path, name, target):
    from triton.backends.compiler import GPUTarget

    backend, arch, width, kind = TARGETS[target]
    path = tmp_path / "kernel.ttir"
    path.write_text(captured(name))
    assert triton.compile(str(path), target=GPUTarget(backend, arch, width)).asm[kind]
