"""Nested tensors with the strided layout: results, gradients and errors are the CPU's."""

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor")
SIZES = ((3, 8), (5, 8), (1, 8))


def parts(device, sizes=SIZES):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g).to(device) for s in sizes]


def on_both(function, sizes=SIZES):
    """Results of a function of a nested tensor on both devices."""
    return [function(torch.nested.nested_tensor(parts(device, sizes))) for device in ("cpu", "cuda")]


def same(expected, found):
    assert found.is_nested == expected.is_nested
    assert found.device.type == "cuda"
    if expected.is_nested:
        assert found.size(0) == expected.size(0)
        for a, b in zip(expected.unbind(), found.unbind(), strict=True):
            assert torch.equal(a, b.cpu())
    else:
        assert torch.equal(expected, found.cpu())


@pytest.mark.parametrize(
    "function",
    [
        torch.relu, torch.tanh, torch.abs, torch.neg, torch.sin, torch.cos, torch.sgn, torch.isnan, torch.clone,
        nn.functional.gelu, nn.functional.silu, torch.ones_like, torch.zeros_like,
        lambda n: n + n, lambda n: n.half() * 0.1, lambda n: n.double() + 0.1, lambda n: n.to(torch.int64) / 3,
        lambda n: n - n * 2, lambda n: n / 3, lambda n: n * torch.tensor(2.0), lambda n: n > 0,
        lambda n: n.masked_fill(n > 0, 1.0),
        lambda n: n.transpose(1, 2), lambda n: n.transpose(1, 2).contiguous(), lambda n: n.unsqueeze(2).squeeze(2),
        lambda n: n.view(3, -1, 2, 4), lambda n: n.reshape(3, -1, 2, 4).transpose(1, 2), lambda n: n.chunk(2, -1)[1],
        lambda n: n[1], lambda n: n.select(0, 2), lambda n: n.softmax(-1), lambda n: n.transpose(1, 2).softmax(1),
        lambda n: n.to_padded_tensor(0.5), lambda n: n.to_padded_tensor(0.5, (4, 6, 9)), lambda n: n.double(),
        lambda n: torch.matmul(n, n.transpose(1, 2)), lambda n: torch.bmm(n, n.transpose(1, 2)),
        lambda n: torch.cat([n, n]), lambda n: n.add_(1.0), lambda n: n.relu_().mul_(2.0), lambda n: n.detach().zero_(),
        lambda n: nn.functional.scaled_dot_product_attention(*[n.view(3, -1, 2, 4).transpose(1, 2).contiguous()] * 3),
        lambda n: nn.functional.scaled_dot_product_attention(n, n, n),
        lambda n: nn.functional.scaled_dot_product_attention(*[n.view(3, -1, 2, 4)] * 3),  # other heads in each part
        lambda n: torch._nested_from_padded(n.to_padded_tensor(0.0), torch.tensor([[3, 8], [5, 8], [1, 8]])),
    ],
)  # fmt: skip
def test_operators_have_the_cpus_bits(cuda, function):
    same(*on_both(function))


def test_layer_norm_and_linear_with_gradients(cuda):
    grads = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8)).to(device)
        leaves = [t.requires_grad_() for t in parts(device)]
        out = model(torch.nested.as_nested_tensor(leaves))
        out.to_padded_tensor(0.0).square().sum().backward()
        grads.append([t.grad.cpu() for t in [*leaves, *model.parameters()]])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("norm_first", "activation"), [(False, "relu"), (True, "relu"), (False, "gelu")])
def test_an_encoder_with_a_padding_mask_takes_its_fast_path(cuda, norm_first, activation):
    found = []
    for device in ("cpu", cuda):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, activation=activation, norm_first=norm_first, batch_first=True)
        model = nn.TransformerEncoder(layer, 2).eval().to(device)
        x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)).to(device)
        mask = torch.arange(5, device=device) >= torch.tensor([[5], [2], [4]], device=device)
        with torch.no_grad():
            found.append(model(x, src_key_padding_mask=mask))
    if activation == "gelu":  # CUDA's fused kernel, which we follow, approximates GELU
        assert torch.allclose(found[0], found[1].cpu(), atol=1e-3)
    else:
        same(*found)


def test_a_device_may_be_named_at_creation(cuda):
    n = torch.nested.nested_tensor(parts("cpu"), device="cuda")
    assert n.device == torch.device("cuda", 0) and n.unbind()[1].device.type == "cuda"
    moved = torch.nested.nested_tensor(parts("cpu")).cuda()
    same(n.cpu(), moved)
    assert repr(n).startswith("nested_tensor([") and "wooly" not in repr(n)


@pytest.mark.parametrize(
    "function",
    [
        lambda n: n.transpose(0, 1),
        lambda n: n + torch.nested.nested_tensor(parts(n.device, ((2, 8), (5, 8), (1, 8)))),
        lambda n: nn.functional.layer_norm(
            n, (5, 8), torch.ones(5, 8, device=n.device), torch.ones(5, 8, device=n.device)
        ),
        lambda n: nn.functional.linear(n, torch.zeros(3, 7, device=n.device)),
        lambda n: torch.nested.nested_tensor([n[0], n[0][0]]),
        lambda n: torch.bmm(n, n),
    ],
)
def test_errors_are_the_cpus(cuda, function):
    messages = []
    for device in ("cpu", "cuda"):
        with pytest.raises(RuntimeError) as e:
            function(torch.nested.nested_tensor(parts(device)))
        messages.append((type(e.value), str(e.value)))
    assert messages[0] == messages[1]


def test_an_operator_that_cuda_lacks_is_refused(cuda):
    with pytest.raises(NotImplementedError, match=r"aten.sum.dim_IntList"):
        torch.nested.nested_tensor(parts("cuda")).sum(-1, keepdim=True)


def test_a_dense_row_for_each_part_is_added_and_multiplied_as_on_cuda(cuda):
    host = parts("cpu")
    n, rows = torch.nested.nested_tensor(parts(cuda)), torch.arange(24.0).reshape(3, 1, 8)
    for found, expected in ((n + rows.to(cuda), torch.add), (n * rows.to(cuda), torch.mul)):
        for a, part, row in zip(found.unbind(), host, rows, strict=True):
            assert torch.equal(a.cpu(), expected(part, row))
    flat = torch.nested.nested_tensor([t[:, 0] for t in host]).to(cuda)
    for a, part, row in zip((flat * rows[..., 1].to(cuda)).unbind(), host, rows, strict=True):
        assert torch.equal(a.cpu(), part[:, 0] * row[:, 1])
    for shape in ((3, 1, 7), (3, 1), (2, 1, 8), (3, 2, 8)):
        with pytest.raises(RuntimeError, match="Expected both self and other to be nested"):
            n + torch.ones(shape, device=cuda)


def test_jagged_values_are_padded_and_back(cuda):
    offsets, lengths = torch.tensor([0, 3, 3, 8]), [4]
    found = []
    for device in ("cpu", cuda):
        values = torch.arange(16.0).reshape(8, 2).to(device)
        o = offsets.to(device)
        padded = torch.ops.aten._jagged_to_padded_dense_forward(values, [o], [5], -1.0)
        back = torch.ops.aten._padded_dense_to_jagged_forward(padded * 2, [o], 8)
        cut = torch.ops.aten._jagged_to_padded_dense_forward(values, [o], lengths, 0.5)
        found.append([t.cpu() for t in (padded, back, cut)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_jagged_tensor_is_padded_with_gradients(cuda):
    found = []
    for device in ("cpu", cuda):
        leaves = [t.requires_grad_() for t in parts(device)]
        n = torch.nested.as_nested_tensor(leaves, layout=torch.jagged)
        n.sin().to_padded_tensor(0.0).square().sum().backward()
        found.append([t.grad.cpu() for t in leaves])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_host_tensors_can_be_pinned(cuda, layout):
    n = torch.nested.nested_tensor(parts("cpu"), layout=layout)
    pinned = n.pin_memory()
    assert pinned.is_pinned() and not n.is_pinned() and pinned.pin_memory() is pinned
    same(n, pinned.to(cuda, non_blocking=True))
    if layout is torch.jagged:
        assert torch.nested.nested_tensor(parts("cpu"), layout=layout, pin_memory=True).is_pinned()


def heads(device, lengths=(3, 5, 1), dtype=torch.float32, **more):
    """A jagged tensor `[batch, heads, *, width]`, and its parts."""
    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(n, 2, 8, generator=g).to(device, dtype).requires_grad_(**more) for n in lengths]
    return torch.nested.as_nested_tensor(leaves, layout=torch.jagged).transpose(1, 2), leaves


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_over_jagged_tensors_equals_attention_over_each_sequence(cuda, causal, dtype):
    n, leaves = heads(cuda, dtype=dtype)
    out = nn.functional.scaled_dot_product_attention(n, n, n, is_causal=causal)
    assert out.layout is torch.jagged
    out.values().float().square().sum().backward()
    dense = [t.detach().cpu().requires_grad_() for t in leaves]
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    for part, t in zip(out.unbind(), dense, strict=True):
        one = t.transpose(0, 1)[None]
        expected = nn.functional.scaled_dot_product_attention(one, one, one, is_causal=causal)[0]
        expected.float().square().sum().backward()
        assert torch.allclose(part.cpu(), expected, atol=tolerance)
    for t, expected in zip(leaves, dense, strict=True):
        assert torch.allclose(t.grad.cpu(), expected.grad, atol=10 * tolerance)


def test_a_packed_projection_of_a_jagged_tensor_is_attended(cuda):
    torch.manual_seed(0)
    projection = nn.Linear(16, 48).to(cuda)
    n = torch.nested.nested_tensor([torch.randn(k, 16, device=cuda) for k in (4, 2)], layout=torch.jagged)
    q, k, v = (t.unflatten(-1, [2, 8]).transpose(1, 2) for t in projection(n).chunk(3, -1))
    out = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True).transpose(1, 2).flatten(-2)
    assert [t.shape for t in out.unbind()] == [(4, 16), (2, 16)]
    out.values().sum().backward()
    assert projection.weight.grad.isfinite().all()


def test_attention_over_jagged_tensors_is_compiled(cuda):
    n, _ = heads(cuda, requires_grad=False)
    attend = lambda n: nn.functional.scaled_dot_product_attention(n, n, n, is_causal=True).values()  # noqa: E731
    assert torch.equal(torch.compile(attend, fullgraph=True)(n), attend(n))


def test_a_compiled_graph_whose_only_device_tensor_is_jagged_runs_on_the_device(cuda):
    from torch.nested._internal.nested_tensor import nested_from_padded

    def sine(n):
        return nested_from_padded(n.to_padded_tensor(4.2).sin(), n.offsets(), sum_S=n.values().shape[0])

    n = torch.nested.nested_tensor(parts(cuda), layout=torch.jagged)
    found = torch.compile(lambda n: torch.utils.checkpoint.checkpoint(sine, n, use_reentrant=False), fullgraph=True)(n)
    assert torch.equal(found.values(), n.values().sin())


def test_projection_of_a_nested_tensor_is_padded_with_zeros_to_a_multiple_of_8(cuda):
    parts = [torch.rand(n, 12) for n in (3, 2)]
    bias = torch.rand(12)
    nested = torch.nested.nested_tensor(parts, device=cuda)
    q, k, v = torch._transform_bias_rescale_qkv(nested, bias.to(cuda), num_heads=2)
    assert q.shape == k.shape == v.shape == (2, 2, 8, 2)
    values = v.cpu()
    assert values[0, :, 3:].count_nonzero() == values[1, :, 2:].count_nonzero() == 0
    expected = (parts[0] + bias).view(3, 3, 2, 2)[:, 2].transpose(0, 1)
    torch.testing.assert_close(values[0, :, :3], expected)
