"""Tests of results in tensors that the caller gives (`out=`)."""

import pytest
import torch

OUTS_ON_THE_HOST = {
    "nonzero": lambda x: torch.nonzero(x, out=torch.empty(0, dtype=torch.int64)),
    "masked_select": lambda x: torch.masked_select(x, x > 0, out=torch.empty(0)),
    "mode": lambda x: torch.mode(x, out=(torch.empty(0), torch.empty(0, dtype=torch.int64))),
}


@pytest.mark.parametrize("name", OUTS_ON_THE_HOST)
def test_out_on_the_host_raises_as_cuda_does(cuda, name):
    with pytest.raises(
        RuntimeError, match="Expected all tensors to be on the same device, but found at least two devices"
    ):
        OUTS_ON_THE_HOST[name](torch.tensor([0.0, 1.0], device="cuda"))


def test_efficient_zero_tensor_is_zero(cuda):
    zeros = torch._efficientzerotensor((2, 3), dtype=torch.float64, device="cuda")
    assert zeros.device.type == "cuda" and (zeros + 1).cpu().equal(torch.ones(2, 3, dtype=torch.float64))
