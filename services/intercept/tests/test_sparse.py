"""Sparse tensors on the device: construction, operators, gradients and trainings equal the CPU's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from wooly import api, device

INDICES = torch.tensor([[0, 1, 1, 2], [2, 0, 2, 2]])
VALUES = torch.tensor([3.0, 4.0, 5.0, 6.0])
DENSE = torch.arange(9.0).reshape(3, 3)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse ... tensor support", "ignore:Sparse invariant checks")


def coo(device, dtype=torch.float32):
    return torch.sparse_coo_tensor(INDICES.to(device), VALUES.to(device, dtype), (3, 3))


def csr(device):
    return DENSE.to(device).to_sparse_csr()


def parts(t):
    """Everything that a tensor is, as host tensors."""
    t = t.detach().cpu()
    if t.layout is torch.strided:
        return [t]
    if t.layout is torch.sparse_coo:
        return [t._indices(), t._values(), torch.tensor([*t.shape, t.is_coalesced()])]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.crow_indices(), t.col_indices(), t.values(), torch.tensor(t.shape)]
    return [t.ccol_indices(), t.row_indices(), t.values(), torch.tensor(t.shape)]


def assert_same(ours, theirs):
    ours, theirs = [list(r) if isinstance(r, (list, tuple)) else [r] for r in (ours, theirs)]
    for a, b in zip(ours, theirs, strict=True):
        assert (a.layout, a.dtype) == (b.layout, b.dtype) and a.is_cuda
        assert all(torch.equal(x, y) for x, y in zip(parts(a), parts(b), strict=True))


def shuffled(device, columns=(2, 0, 1, 2)):
    """A CSR matrix whose columns are not sorted, or occur several times. PyTorch accepts it."""
    starts = torch.tensor([0, 2, 3, 4]).to(device)
    return torch.sparse_csr_tensor(starts, torch.tensor(columns).to(device), VALUES.to(device), (3, 3))


CALLS = {
    "unsorted csr": shuffled,
    "unsorted csr mm": lambda d: shuffled(d) @ DENSE.to(d),
    "unsorted csr mv": lambda d: shuffled(d) @ torch.ones(3, device=d),
    "unsorted csr to dense": lambda d: shuffled(d).to_dense(),
    "unsorted csr, transposed": lambda d: shuffled(d).t() @ DENSE.to(d),
    "unsorted csr, scaled": lambda d: shuffled(d) * 2,
    "unsorted csr times itself": lambda d: (shuffled(d) @ shuffled(d)).to_dense(),
    "csr with repeated columns mm": lambda d: shuffled(d, (1, 1, 0, 2)) @ DENSE.to(d),
    "csr with repeated columns times itself": lambda d: (
        shuffled(d, (1, 1, 0, 2)) @ shuffled(d, (1, 1, 0, 2))
    ).to_dense(),
    "csr with repeated columns to dense": lambda d: shuffled(d, (1, 1, 0, 2)).to_dense(),
    "coo": coo,
    "copy of host": lambda d: coo("cpu").to(d),
    "csr of components": lambda d: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2, 3]).to(d), torch.tensor([0, 1, 2]).to(d), VALUES[:3].to(d), (3, 3)
    ),
    "to_dense": lambda d: coo(d).to_dense(),
    "coalesce": lambda d: coo(d).coalesce(),
    "to_sparse": lambda d: DENSE.to(d).to_sparse(),
    "to_sparse_csr": csr,
    "to_sparse_csc": lambda d: DENSE.to(d).to_sparse_csc(),
    "to_sparse_bsr": lambda d: torch.ones(4, 4, device=d).to_sparse_bsr((2, 2)),
    "coo to csr": lambda d: coo(d).to_sparse_csr(),
    "csr to dense": lambda d: csr(d).to_dense(),
    "mm": lambda d: torch.sparse.mm(coo(d), DENSE.to(d)),
    "csr mm": lambda d: csr(d) @ DENSE.to(d),
    "csr mv": lambda d: csr(d) @ torch.ones(3, device=d),
    "addmm": lambda d: torch.sparse.addmm(DENSE.to(d), coo(d), DENSE.to(d), beta=0.5, alpha=2.0),
    "sparse mm sparse": lambda d: torch.sparse.mm(coo(d), coo(d)),
    "transpose": lambda d: coo(d).t(),
    "times number": lambda d: coo(d) * 2,
    "times number in place": lambda d: coo(d).mul_(3),
    "int times float": lambda d: coo(d, torch.int64) * 1.5,
    "csr times number": lambda d: csr(d) * 2.5,
    "over number": lambda d: coo(d) / 3,
    "over number rounded": lambda d: torch.div(coo(d), 2.0, rounding_mode="floor"),
    "times dense": lambda d: coo(d) * DENSE.to(d),
    "add": lambda d: (coo(d) + coo(d)).coalesce(),
    "add of another dtype in place": lambda d: coo(d, torch.uint8).add_(coo(d, torch.int8)).coalesce(),
    "add to dense": lambda d: DENSE.to(d) + coo(d),
    "sum": lambda d: torch.sparse.sum(coo(d)),
    "sum over dimension": lambda d: torch.sparse.sum(coo(d), 0),
    "softmax": lambda d: torch.sparse.softmax(coo(d), 1),
    "relu": lambda d: torch.relu(coo(d).coalesce()),
    "cat": lambda d: torch.cat([coo(d), coo(d)]),
    "sparse_mask": lambda d: DENSE.to(d).sparse_mask(coo(d).coalesce()),
    "index_select": lambda d: coo(d).index_select(0, torch.tensor([2, 0]).to(d)),
    "empty": lambda d: torch.sparse_coo_tensor((3, 4), device=d),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_sparse_operator_equals_cpu(cuda, call):
    assert_same(call(cuda), call("cpu"))


def waits():
    return device.current().devices.recorders[0].require_link().waits.count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_sum_of_sparse_tensors_has_the_elements_of_both_and_does_not_wait(cuda, dtype):
    """CUDA's kernel joins them, so that gradients are accumulated without a wait."""
    indices, values = torch.tensor([[7, 1, 3]], device=cuda), torch.tensor([1, 2, 3], dtype=dtype, device=cuda)
    a, b = (torch.sparse_coo_tensor(indices, values * k, (10,)) for k in (1, 2))
    before = waits()
    added, subtracted, kept = a + b, torch.sub(a, b, alpha=2), a.clone()
    kept += b
    assert waits() == before
    for found, factor in ((added, 2), (kept, 2), (subtracted, -4)):
        assert found._indices().tolist() == [[7, 1, 3, 7, 1, 3]] and not found.is_coalesced() and found.dtype is dtype
        assert found._values().tolist() == [1, 2, 3, factor, 2 * factor, 3 * factor]
    small = torch.sparse_coo_tensor(indices[:, :2] % 2, values[:2], (2,))
    assert (small + small)._nnz() == 1  # more elements than places: they are added


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sparse_gradients_of_an_embedding_accumulate_as_on_cuda(cuda, dtype):
    embedding = torch.nn.Embedding(10, 3, sparse=True, device=cuda, dtype=dtype)
    words = torch.tensor([7, 1, 3], device=cuda)
    for _ in range(2):
        embedding(words).sum().backward()
    grad = embedding.weight.grad
    assert grad._indices().tolist() == [[7, 1, 3, 7, 1, 3]] and torch.equal(
        grad._values().cpu(), torch.ones(6, 3, dtype=dtype)
    )
    assert torch.equal(grad.to_dense()[words].cpu(), torch.full((3, 3), 2.0, dtype=dtype))


@st.composite
def matrices(draw):
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    places = draw(st.lists(st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1)), max_size=12))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    values = draw(st.lists(st.floats(-9, 9, width=32), min_size=len(places), max_size=len(places)))
    indices = torch.tensor(places, dtype=torch.int64).reshape(-1, 2).t()
    return indices, torch.tensor(values, dtype=dtype), (rows, columns)


@given(matrices())
def test_sparse_matrices_of_any_shape_equal_cpu(cuda, matrix):
    indices, values, size = matrix

    def run(device):
        a = torch.sparse_coo_tensor(indices.to(device), values.to(device), size)
        x = torch.arange(size[1] * 3.0, dtype=values.dtype).reshape(size[1], 3).to(device)
        return a @ x, a.coalesce(), (a + a).to_dense(), a.to_sparse_csr() @ x, torch.sparse.sum(a)

    assert_same(run(cuda), run("cpu"))


def test_gradients_of_sparse_product_equal_cpu(cuda):
    def run(device):
        a, x = coo(device).requires_grad_(), DENSE.clone().to(device).requires_grad_()
        (torch.sparse.mm(a, x) * DENSE.to(device)).sum().backward()
        return a.grad, x.grad

    assert_same(run(cuda), run("cpu"))


def test_product_with_dense_matrix_does_not_wait(cuda):
    a, x, link = coo(cuda), DENSE.to(cuda), api.attached_links()[0]
    before = link.syncs
    (a @ x).sum()
    assert link.syncs == before


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
def test_training_with_sparse_gradients_equals_cpu(cuda, optimizer):
    def run(device):
        torch.manual_seed(0)
        embedding = nn.Embedding(10, 4, sparse=True).to(device)
        steps = optimizer(embedding.parameters(), lr=0.1)
        for _ in range(3):
            steps.zero_grad()
            embedding(torch.tensor([1, 2, 2, 5]).to(device)).square().sum().backward()
            steps.step()
        return embedding.weight

    assert_same(run(cuda), run("cpu"))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_sparse_gradient_of_embedding_bag_equals_cpu(cuda, mode, last):
    def run(device):
        torch.manual_seed(0)
        bag = nn.EmbeddingBag(10, 4, mode=mode, sparse=True, include_last_offset=last, padding_idx=2).to(device)
        offsets = torch.tensor([0, 2, 2, 5] + [7] * last).to(device)
        bag(torch.tensor([1, 2, 2, 5, 7, 2, 2]).to(device), offsets).square().sum().backward()
        return bag.weight.grad

    assert_same(run(cuda), run("cpu"))


def test_graph_network_with_sparse_adjacency_equals_cpu(cuda):
    def run(device):
        torch.manual_seed(0)
        adjacency = (torch.rand(20, 20) > 0.8).float().to_sparse().to(device)
        x, wanted = torch.randn(20, 8).to(device), (torch.arange(20) % 3).to(device)
        net = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 3)]).to(device)
        steps, losses = torch.optim.Adam(net.parameters()), []
        for _ in range(4):
            hidden = torch.relu(torch.sparse.mm(adjacency, net[0](x)))
            loss = nn.functional.cross_entropy(torch.sparse.mm(adjacency, net[1](hidden)), wanted)
            steps.zero_grad()
            loss.backward()
            steps.step()
            losses.append(loss)
        return losses

    assert_same(run(cuda), run("cpu"))


def test_print_of_sparse_tensor_equals_cpu_but_for_device(cuda):
    assert str(coo(cuda)).replace("device='cuda:0', ", "") == str(coo("cpu"))


def test_unsupported_sparse_operator_says_what_to_do(cuda):
    with pytest.raises(
        NotImplementedError, match=r"not supported on the wooly device for sparse tensors.*to_dense\(\)"
    ):
        coo(cuda).coalesce().cumsum(0)


def test_sparse_index_out_of_range_is_an_error(cuda):
    a = torch.sparse_coo_tensor(torch.tensor([[0, 7]]).to(cuda), torch.ones(2, device=cuda), (3,))
    with pytest.raises(RuntimeError, match="index out of range: dimension 0 has size 3"):
        a.to_dense().sum().item()
    assert torch.ones(2, device=cuda).sum().item() == 2


@pytest.mark.parametrize("narrow", [False, True])
def test_compressed_indices_convert_both_ways(cuda, narrow):
    rows, columns = torch.tensor([0, 0, 1, 3, 3, 3]), torch.tensor([1, 2, 0, 4, 3, 1])
    ours = torch._convert_indices_from_coo_to_csr(rows.to(cuda), 5, out_int32=narrow)
    theirs = torch._convert_indices_from_coo_to_csr(rows, 5, out_int32=narrow)
    assert ours.dtype is theirs.dtype and ours.cpu().equal(theirs)
    for transpose in (False, True):
        options = {"out_int32": narrow, "transpose": transpose}
        back = torch._convert_indices_from_csr_to_coo(ours, columns.to(cuda), **options)
        expected = torch._convert_indices_from_csr_to_coo(theirs, columns, **options)
        assert back.dtype is expected.dtype and back.cpu().equal(expected)


def test_sums_of_sparse_tensors_in_half_precision(cuda):
    for found, expected in ((torch.add, VALUES * 3), (torch.sub, -VALUES)):
        t = found(coo(cuda, torch.float16), coo(cuda, torch.float16), alpha=2).coalesce()
        assert t.dtype is torch.float16
        assert torch.equal(
            t.to_dense().cpu().float(), torch.zeros(3, 3).index_put_(tuple(INDICES), expected, accumulate=True)
        )
    t = coo(cuda, torch.float16)
    t += t
    assert torch.equal(t.to_dense().cpu().float(), coo("cpu").to_dense() * 2)


def test_products_with_checked_invariants_equal_cpu(cuda):
    with torch.sparse.check_sparse_tensor_invariants(True):
        for layout in (torch.sparse_csr, torch.sparse_csc):
            weight = [DENSE.to(d).to_sparse(layout=layout).requires_grad_() for d in ("cpu", cuda)]
            host, there = [nn.functional.linear(torch.ones(3, device=w.device), w) for w in weight]
            assert torch.equal(there.cpu(), host)
            grads = [torch.autograd.grad(y.sum(), w)[0] for y, w in zip((host, there), weight, strict=True)]
            assert torch.equal(grads[0].to_dense(), grads[1].to_dense().cpu())
        with pytest.raises(RuntimeError, match="a row must have 0 to 2 elements"):
            torch.sparse_csr_tensor(
                torch.tensor([0, 2, 1], device=cuda), torch.tensor([0], device=cuda), torch.ones(1, device=cuda), (2, 2)
            )


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc])
def test_batches_and_parts_of_compressed_tensors_equal_cpu(cuda, layout):
    block = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    one = torch.tensor([[1.0, 2, 0, 0], [3, 0, 0, 0], [0, 0, 4, 0], [0, 0, 0, 5]])
    host = torch.stack([one, one * 2, one.flip(1).flip(0) * 3]).to_sparse(layout=layout, blocksize=block)
    parts = [
        getattr(torch.Tensor, name)(host)
        for name in (
            ("crow_indices", "col_indices")
            if layout in (torch.sparse_csr, torch.sparse_bsr)
            else ("ccol_indices", "row_indices")
        )
    ]
    there = torch.sparse_compressed_tensor(
        *[p.to(cuda) for p in (*parts, host.values())], host.shape, layout=layout, check_invariants=True
    )
    assert torch.equal(there.to_dense().cpu(), host.to_dense())
    assert torch.equal(there.select(0, 1).to_dense().cpu(), host.select(0, 1).to_dense())
    if block is None:
        matrix, expected = there[2], host[2]
        assert torch.equal(matrix.select(0, 0).to_dense().cpu(), expected.select(0, 0).to_dense())
        assert torch.equal(
            torch.select_copy(matrix, 1, 2).to_dense().cpu(), torch.select_copy(expected, 1, 2).to_dense()
        )
    dense = torch.arange(48.0).reshape(3, 4, 4)
    expected = dense + 2 * host.to_dense()
    assert torch.equal(torch.add(dense.to(cuda), there, alpha=2).cpu(), expected)
    assert torch.equal(dense.to(cuda).add_(there, alpha=2).cpu(), expected)
    assert torch.equal((there + dense.to(cuda)).cpu(), dense + host.to_dense())
    if block is not None:
        with pytest.raises((RuntimeError, NotImplementedError)):
            there @ dense.to(cuda)
        return
    leaf, alike = dense.to(cuda).requires_grad_(), dense.clone().requires_grad_()
    torch.bmm(there, leaf).square().sum().backward()
    torch.bmm(host.to_dense(), alike).square().sum().backward()
    assert torch.allclose(leaf.grad.cpu(), alike.grad)
    assert torch.allclose(torch.baddbmm(leaf, there, leaf).detach().cpu(), torch.baddbmm(dense, host.to_dense(), dense))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("layout", ["sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
def test_masks_and_sums_of_compressed_tensors_equal_cpu(cuda, layout, batched):
    blocks = {"blocksize": (2, 2)} if layout.startswith("sparse_bs") else {}
    dense = torch.arange(48.0).reshape(2, 4, 6).remainder(5)
    host = (dense if batched else dense[0]).to_sparse(layout=getattr(torch, layout), **blocks)
    there = host.to(cuda)
    full = torch.arange(1.0, host.numel() + 1).reshape(host.shape)
    for on_host, on_device in (
        (full.sparse_mask(host), full.to(cuda).sparse_mask(there)),
        (host.sparse_mask(host), there.sparse_mask(there)),
        (host + host, there + there),
        (torch.add(host, host, alpha=3), torch.add(there, there, alpha=3)),
    ):
        assert on_device.layout is host.layout and on_device.is_cuda
        assert torch.equal(on_device.to_dense().cpu(), on_host.to_dense())


@pytest.mark.parametrize("layout", ["sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
def test_compressed_tensors_are_filled_like_others(cuda, layout):
    blocks = {"blocksize": (2, 2)} if layout.startswith("sparse_bs") else {}
    host = torch.eye(4).to_sparse(layout=getattr(torch, layout), **blocks)
    there = host.to(cuda)
    for made in (torch.ones_like, torch.zeros_like, lambda t: torch.full_like(t, 3.0)):
        assert torch.equal(made(there).cpu().to_dense(), made(host).to_dense())
    elsewhere = torch.zeros_like(there, device="cuda", dtype=torch.float64)
    assert elsewhere.is_cuda and elsewhere.layout is there.layout and elsewhere.cpu().values().count_nonzero() == 0
    drawn = torch.randn_like(there)
    assert drawn.layout is there.layout and drawn.values().cpu().abs().sum() > 0
    with pytest.raises(NotImplementedError, match="uniform_"):
        torch.rand_like(there)  # as on the host
    assert torch.equal(there.cpu().to_dense(), torch.eye(4))


@pytest.mark.parametrize("layout", ["sparse_csr", "sparse_csc"])
def test_batches_and_dense_dimensions_of_compressed_tensors_are_converted(cuda, layout):
    matrix = torch.tensor([[1.0, 0, 2, 0], [0, 0, 0, 3], [1, 0, 0, 0], [0, 0, 0, 0]])
    of = getattr(torch, layout)
    batch = torch.stack([matrix, 2 * matrix]).to_sparse(layout=of, dense_dim=0)
    hybrid = torch.stack([matrix, -matrix], -1).to_sparse(layout=of, dense_dim=1)
    for t in (batch, hybrid):
        for to in (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo):
            found = t.to(cuda).to_sparse(layout=to)
            assert found.layout is to and torch.equal(found.cpu().to_dense(), t.to_dense())
    blocked = hybrid.to(cuda).to_sparse(layout=torch.sparse_bsr, blocksize=(2, 2))
    assert torch.equal(blocked.cpu().to_dense(), hybrid.to_dense())


def test_spsolve_raises_the_error_of_builds_without_cudss(cuda):
    a = torch.eye(3).to_sparse_csr().to(cuda)
    with pytest.raises(RuntimeError, match="requires compiling PyTorch with CUDA cuDSS"):
        torch.sparse.spsolve(a, torch.ones(3, device=cuda))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.parametrize("make", [torch.empty, torch.zeros])
def test_factories_make_sparse_tensors(cuda, make, layout):
    made = make((2, 3), layout=layout, device=cuda, dtype=torch.int16)
    assert made.is_cuda and made.layout is layout and made.dtype is torch.int16 and made._nnz() == 0
    assert not (made + made).to_dense().cpu().any()
    if layout is not torch.sparse_coo:
        with pytest.raises(RuntimeError, match=f"torch.{make.__name__}: Only batched sparse compressed"):
            make((3,), layout=layout, device=cuda)


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_bsc])
def test_compressed_tensor_without_content_has_the_sizes_of_the_cpu(cuda, layout):
    block = (1, 2) if layout is torch.sparse_bsc else ()
    found, expected = [
        torch.ops.aten._sparse_compressed_tensor_with_dims(
            4, 1, (2, 6, 4, 3), block, torch.int32, dtype=torch.float64, layout=layout, device=device
        )
        for device in (cuda, "cpu")
    ]
    assert found.is_cuda and found.shape == expected.shape and found.layout is layout
    assert [(p.shape, p.dtype) for p in parts(found)] == [(p.shape, p.dtype) for p in parts(expected)]


def test_compressed_matrix_changes_its_size(cuda):
    ours, theirs = csr(cuda), csr("cpu")
    for size in ((5, 7), (2, 7)):
        ours.resize_(size)
        theirs.resize_(size)
        assert_same(ours, theirs)
    with pytest.raises(RuntimeError, match="Resizing columns of sparse CSR tensors to a smaller value"):
        ours.resize_(2, 2)


@pytest.mark.parametrize(
    ("shape", "dense", "wanted"), [((1, 3), 0, (4, 3)), ((3, 1), 0, (2, 3, 4)), ((2, 1, 2), 1, (2, 3, 2))]
)
def test_sparse_tensor_is_expanded(cuda, shape, dense, wanted):
    t = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).to_sparse(len(shape) - dense)
    expected = t.to_dense().expand(wanted).to_sparse(len(wanted) - dense)
    assert_same(torch._sparse_broadcast_to(t.to(cuda), wanted), expected)
    twice = torch.sparse_coo_tensor(t.indices().repeat(1, 2), t.values().repeat((2,) + (1,) * dense), shape)
    found = torch._sparse_broadcast_to(twice.to(cuda), wanted)
    assert not found.is_coalesced() and torch.equal(found.to_dense().cpu(), 2 * expected.to_dense())
    with pytest.raises(RuntimeError, match="cannot be expanded"):
        torch._sparse_broadcast_to(t.to(cuda), (7, 7, 7))


def test_products_and_sums_of_hybrid_compressed_tensors_equal_cpu(cuda):
    ours, theirs = [torch.arange(24.0, device=d).reshape(3, 4, 2).to_sparse_csr(dense_dim=1) for d in (cuda, "cpu")]
    assert_same(ours * ours, theirs * theirs)
    assert_same(
        torch._sparse_csr_sum(csr(cuda), (0, 1), keepdim=True), torch._sparse_csr_sum(csr("cpu"), (0, 1), keepdim=True)
    )


@pytest.mark.parametrize("number", [2, torch.tensor(2.0)])
def test_number_times_batch_of_compressed_matrices(cuda, number):
    batch = torch.ones(2, 3, 3)
    assert_same(number * batch.to(cuda).to_sparse_csr(), number * batch.to_sparse_csr())


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_mask_of_dense_matrix_does_not_wait(cuda, layout):
    ours, theirs = [DENSE.to(d).to_sparse(layout=layout) for d in (cuda, "cpu")]
    link, dense = api.attached_links()[0], DENSE.to(cuda)
    before = link.syncs
    found = (dense * 2).sparse_mask(ours)
    assert link.syncs == before
    assert_same(found, (DENSE * 2).sparse_mask(theirs))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_short_numbers_are_added_in_float32(cuda, layout, dtype):
    matrix, other, added = DENSE.to(dtype), (DENSE - 4).to(dtype), torch.full((3, 3), 0.25, dtype=dtype)
    sparse, dense, to = matrix.to(cuda).to_sparse(layout=layout), other.to(cuda), added.to(cuda)
    exact = matrix.float() @ other.float()
    found = {
        "mm": sparse @ dense,
        "addmm": torch.addmm(to, sparse, dense, beta=4).float() - 1,
        "in place": to.clone().addmm_(sparse, dense, beta=4).float() - 1,
        "out": torch.mm(sparse, dense, out=torch.empty_like(dense)),
        "mv": torch.stack([sparse.mv(column) for column in dense.t().contiguous()], 1),
    }
    step = torch.finfo(dtype).eps  # of one rounding: integers up to 2^8 and 2^11 are exact
    for name, t in found.items():
        torch.testing.assert_close(t.cpu().float(), exact, atol=step, rtol=step, msg=name)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.parametrize("grad", [True, False])
def test_linear_layer_takes_sparse_weights(cuda, layout, grad):
    x, bias = DENSE + 1, None if layout is torch.sparse_coo else torch.arange(3.0)
    with torch.set_grad_enabled(grad):
        found = nn.functional.linear(
            x.to(cuda), DENSE.to(cuda).to_sparse(layout=layout), None if bias is None else bias.to(cuda)
        )
    torch.testing.assert_close(found.cpu(), nn.functional.linear(x, DENSE, bias))


def test_error_of_sparse_sum_with_host_tensor_is_cudas(cuda):
    with pytest.raises(RuntimeError, match="add: expected 'self' to be a CUDA tensor, but got a CPU tensor"):
        torch.zeros(3, 3) + coo(cuda)
    with pytest.raises(RuntimeError, match="Input is supposed to be a vector"):
        torch._convert_indices_from_coo_to_csr(torch.zeros(2, 2, dtype=torch.int64, device=cuda), size=3)


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_product_of_sparse_matrices_can_be_used_again(cuda, layout):
    g = torch.Generator().manual_seed(3)
    dense = torch.rand(20, 20, generator=g) * (torch.rand(20, 20, generator=g) > 0.7)
    a = dense.to(cuda).to_sparse(layout=layout)
    product = a @ a  # the library leaves the elements of a row in any order
    torch.testing.assert_close((product @ a).to_dense().cpu(), dense @ dense @ dense)


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_bsr])
@pytest.mark.parametrize("upper", [True, False])
def test_triangular_sparse_system_is_solved(cuda, layout, upper):
    matrix = torch.rand(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 4 * torch.eye(4)
    b = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)
    sparse = matrix.to(cuda).to_sparse(layout=layout, blocksize=(2, 2) if layout is torch.sparse_bsr else None)
    found = torch.triangular_solve(b.to(cuda), sparse, upper=upper)
    expected = torch.linalg.solve_triangular(matrix.triu() if upper else matrix.tril(), b, upper=upper)
    torch.testing.assert_close(found.solution.cpu(), expected)
    assert found.cloned_coefficient.numel() == 0
    nothing = torch.zeros(4, 4, dtype=torch.float64, device=cuda).to_sparse_csr()
    assert torch.triangular_solve(b.to(cuda), nothing).solution.isnan().all()


def test_product_of_sparse_matrices_takes_half_precision(cuda):
    a = coo(cuda).half().coalesce()
    found = torch.ops.aten._sparse_sparse_matmul(a, a)
    dense = coo("cpu").to_dense()
    assert found.dtype is torch.float16 and torch.equal(found.to_dense().float().cpu(), dense @ dense)


def _batch(*batch):
    dense = torch.arange(1.0, 13.0).expand(*batch, 12).unflatten(-1, (3, 4)).clone()
    dense[..., 0, 0] = dense[..., 1, 2] = 0
    return dense.to_sparse_csr()


@pytest.mark.parametrize("batch", [(2,), (2, 3), ()])
def test_sampled_product_of_batches_is_computed(cuda, batch):
    found = []
    for where in (cuda, "cpu"):
        torch.manual_seed(0)
        left, right = torch.rand(*batch, 3, 5).to(where), torch.rand(*batch, 5, 4).to(where)
        found.append(torch.sparse.sampled_addmm(_batch(*batch).to(where), left, right, beta=0.5, alpha=2.0))
    assert_same(*found)


@pytest.mark.parametrize("shapes", [((3, 3, 5), (3, 5, 4)), ((3, 5), (5, 4)), ((2, 3, 5), (2, 6, 4))])
def test_sampled_product_of_batches_that_do_not_fit_raises_pytorchs_error(cuda, shapes):
    found = []
    for where in (cuda, "cpu"):
        with pytest.raises(RuntimeError) as raised:
            torch.sparse.sampled_addmm(_batch(2).to(where), *[torch.ones(shape, device=where) for shape in shapes])
        found.append(str(raised.value))
    assert found[0] == found[1]
