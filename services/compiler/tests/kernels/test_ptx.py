"""PTX kernels from the client's side: captured like other kernels, refused by an executor without the tenant's permission."""

import pytest
import torch

pytest.importorskip("pyopencl", reason="kernels run through OpenCL: pip install 'pyopencl[pocl]'")
import wooly
from wooly.errors import RemoteOperationError

ADD = """.version 8.0
.target sm_80
.address_size 64
.visible .entry add(
    .param .u64 .ptr .global .align 4 x,
    .param .u32 n,
    .param .align 8 .f64 by
) { ret; }
"""


def test_launch_without_permission_fails_with_remedy(gpu):
    x = torch.zeros(4, device="cuda")
    wooly.ptx_kernel(ADD, "add")((1, 1, 1), (32, 1, 1), [x, 4, 0.5])
    with pytest.raises(RemoteOperationError, match=r"permission opaque_kernels.*ask an administrator for it"):
        torch.cuda.synchronize()
    with pytest.raises(RemoteOperationError):
        x.cpu()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([1], "takes 3 arguments, but 1 are given"),
        ([1, torch.zeros(1), 2.0], "parameter 1 is a u32, but argument 1 is a tensor"),
    ],
)
def test_ptx_arguments_that_do_not_match_are_refused(gpu, args, message):
    with pytest.raises(ValueError, match=message):
        wooly.ptx_kernel(ADD, "add")(args=args)


@pytest.mark.parametrize(
    ("text", "message"), [("", "does not contain .entry add"), (".entry add(.param .texref t) {}", "parameters")]
)
def test_ptx_text_without_kernel_is_refused(text, message):
    with pytest.raises(RuntimeError, match=message):
        wooly.ptx_kernel(text, "add")
