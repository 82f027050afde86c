"""Fake quantisation, training that is aware of it, and products of short numbers: the bits of the CPU."""

import warnings

import pytest
import torch
import torch.ao.quantization as quantization
from torch.nn import functional
from wooly import api
from wooly.torch_private import has_kernel


def trained(device):
    """Losses and state after a few steps of a model whose weights and activations are quantised per channel and per tensor."""
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 5)
    model = torch.nn.Sequential(*layers).to(device).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        model = quantization.prepare_qat(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        x, y = torch.randn(4, 3, 8, 8).to(device), torch.randint(0, 5, (4,)).to(device)
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: t.cpu() for name, t in model.state_dict().items()}


def test_quantisation_aware_training_equals_cpu(cuda):
    (ours, state), (theirs, expected) = trained(cuda), trained("cpu")
    assert ours == theirs and state.keys() == expected.keys()
    different = [name for name, t in expected.items() if not torch.equal(t, state[name])]
    assert different == [] and state["0.weight_fake_quant.scale"].shape == (8,)


def learnable(device, many):
    torch.manual_seed(0)
    x = torch.randn(6, 4).to(device).requires_grad_()
    scale, point = [t.to(device).requires_grad_() for t in (torch.full((many,), 0.1), torch.zeros(many))]
    if many > 1:
        found = torch._fake_quantize_learnable_per_channel_affine(x, scale, point, 0, 0, 255, 0.1)
    else:
        found = torch._fake_quantize_learnable_per_tensor_affine(x, scale, point, 0, 255, 1.0)
    found.pow(2).sum().backward()
    return [t.detach().cpu() for t in (found, x.grad, scale.grad, point.grad)]


@pytest.mark.parametrize("many", [1, 6])
def test_learnable_fake_quantisation_equals_cpu(cuda, many):
    for ours, theirs in zip(learnable(cuda, many), learnable("cpu", many), strict=True):
        assert torch.equal(ours, theirs)


def product(device, out_dtype):
    torch.manual_seed(0)
    a, b = [torch.randn(n, 64).to(torch.float8_e4m3fn).to(device) for n in (32, 48)]
    scales = torch.tensor(0.5).to(device), torch.tensor(2.0).to(device)
    return torch._scaled_mm(a, b.t(), *scales, out_dtype=out_dtype).cpu()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_scaled_product_of_float8_equals_cpu(cuda, out_dtype):
    assert torch.equal(product(cuda, out_dtype), product("cpu", out_dtype))


@pytest.mark.skipif(not has_kernel("aten::_scaled_mm_v2", "CPU"), reason="this PyTorch has it on GPUs alone")
@pytest.mark.parametrize(("recipe", "rows"), [("TensorWise", False), ("RowWise", True)])
def test_public_scaled_product_equals_cpu(cuda, recipe, rows):
    if rows and api._attached.link.device["torch_version"].startswith("2.11."):
        pytest.skip("the executor's PyTorch has no scales of rows on a CPU")
    kind, found = getattr(torch.nn.functional.ScalingType, recipe), []
    for device in ("cpu", cuda):
        torch.manual_seed(0)
        a, b = [torch.randn(16, 32).to(torch.float8_e4m3fn).to(device) for _ in range(2)]
        scales = [torch.rand(shape if rows else ()).to(device) for shape in ((16, 1), (1, 16))]
        found.append(torch.nn.functional.scaled_mm(a, b.t(), scales[0], kind, scales[1], kind).cpu())
    assert torch.equal(*found)


def test_public_scaled_product_of_blocks_is_refused_with_the_cure(cuda):
    a, kind = torch.zeros(16, 32, device=cuda).to(torch.float8_e4m3fn), torch.nn.functional.ScalingType.BlockWise1x128
    with pytest.raises(NotImplementedError, match="TensorWise and RowWise"):
        torch.nn.functional.scaled_mm(
            a, a.t(), torch.ones(16, 1, device=cuda), kind, torch.ones(1, 16, device=cuda), kind
        )


def test_product_of_int8_is_exact_in_int32(cuda):
    a, b = torch.randint(-99, 99, (33, 64), dtype=torch.int8), torch.randint(-99, 99, (64, 40), dtype=torch.int8)
    found = torch._int_mm(a.to(cuda), b.to(cuda))
    assert found.dtype is torch.int32 and torch.equal(found.cpu(), a.int() @ b.int())
