"""2:4 sparse matrices in both of PyTorch's formats: the numbers of the dense matrix, and CUDA's errors."""

import pytest
import torch
from torch.sparse import SparseSemiStructuredTensor, SparseSemiStructuredTensorCUTLASS, to_sparse_semi_structured

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")


def sparse(rows, columns, dtype, seed=0):
    """A 2:4 sparse matrix of small integers, with groups of two, one and no numbers."""
    rng = torch.Generator().manual_seed(seed)
    values = torch.randint(1, 5, (rows, columns), generator=rng)
    order = torch.rand(rows, columns // 4, 4, generator=rng).argsort(-1).argsort(-1)
    kept = torch.randint(0, 3, (rows, columns // 4, 1), generator=rng)
    return (values * (order < kept).reshape(rows, columns)).to(dtype)


def in_cutlass_format(a):
    return SparseSemiStructuredTensorCUTLASS.from_dense(a)


@pytest.fixture(params=["cutlass", "cusparselt"])
def backend(request, monkeypatch):
    monkeypatch.setattr(SparseSemiStructuredTensor, "_FORCE_CUTLASS", request.param == "cutlass")
    return request.param


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_product_has_the_numbers_of_the_dense_matrix(cuda, backend, dtype):
    a, b = sparse(64, 128, dtype), torch.randint(-2, 3, (128, 128)).to(dtype)
    found = to_sparse_semi_structured(a.to(cuda)) @ b.to(cuda).t()
    expected = a.float() @ b.float().t()
    expected = expected.clamp(-128, 127) if dtype is torch.int8 else expected
    assert found.dtype is dtype and torch.equal(found.float().cpu(), expected)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layer_with_sparse_weight_has_the_numbers_of_the_dense_layer(cuda, backend, bias):
    layer = torch.nn.Linear(128, 64, bias=bias, dtype=torch.float16, device=cuda)
    layer.weight = torch.nn.Parameter(sparse(64, 128, torch.float16).to(cuda))
    x = torch.randint(-2, 3, (3, 5, 128)).half().to(cuda)
    with torch.inference_mode():
        expected = layer(x)
        layer.weight = torch.nn.Parameter(to_sparse_semi_structured(layer.weight))
        found = layer(x)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def test_sparse_matrix_becomes_dense_again(cuda, backend):
    a = sparse(64, 128, torch.float16)
    assert torch.equal(to_sparse_semi_structured(a.to(cuda)).to_dense().cpu(), a)


def test_compressed_matrix_has_cusparselts_size_and_begins_with_the_kept_elements(cuda):
    for dtype, sixteenths in ((torch.float16, 9), (torch.int8, 10)):
        a = torch.tensor([0, 0, 3, 4]).tile(32, 16).to(dtype)
        packed = torch._cslt_compress(a.to(cuda))
        assert packed.numel() * 16 == a.numel() * sixteenths and packed.dtype is dtype
        assert packed[: a.numel() // 2].tolist() == [3, 4] * (a.numel() // 4)


def test_cusparselts_product_takes_factors_biases_and_dtypes(cuda):
    a, b = sparse(32, 64, torch.int8), torch.randint(-2, 3, (64, 48)).to(torch.int8)
    packed, exact = torch._cslt_compress(a.to(cuda)), a.int() @ b.int()
    factor, bias = torch.arange(32.0), torch.arange(32.0) - 7
    assert torch.equal(torch._cslt_sparse_mm(packed, b.to(cuda), out_dtype=torch.int32).cpu(), exact)
    found = torch._cslt_sparse_mm(
        packed, b.to(cuda), bias.to(cuda), factor.to(cuda), torch.float16, transpose_result=True
    )
    assert torch.equal(found.cpu(), (exact * factor[:, None] + bias[:, None]).half().t())
    assert torch._cslt_sparse_mm_search(packed, b.to(cuda)) == 0


def test_cutlass_operators_scale_activate_and_widen(cuda):
    a, b = sparse(32, 64, torch.float16), torch.randint(-2, 3, (64, 32)).half()
    tensor = in_cutlass_format(a.to(cuda))
    bias = torch.arange(32.0).half()
    found = torch._sparse_semi_structured_addmm(bias.to(cuda), tensor.packed, tensor.meta, b.to(cuda), alpha=2, beta=3)
    assert torch.equal(found.cpu(), (2 * (a.float() @ b.float()) + 3 * bias.float()[:, None]).half())
    found = torch._sparse_semi_structured_linear(b.t().to(cuda), tensor.packed, tensor.meta, activation="relu")
    assert torch.equal(found.cpu(), (b.float().t() @ a.float().t()).relu().half())


def test_refused_calls_say_why(cuda):
    a = sparse(64, 128, torch.int8).to(cuda)
    with pytest.raises(RuntimeError, match="columns are contiguous in memory; pass a transposed one"):
        in_cutlass_format(a) @ torch.ones(128, 64, dtype=torch.int8, device=cuda)
    with pytest.raises(RuntimeError, match=r"Unsupported dtype for cuSPARSELt compressed matrix: torch\.float64"):
        torch._cslt_compress(a.double())
    with pytest.raises(RuntimeError, match="multiple of 8 elements"):
        torch._cslt_compress(a[:, :6])
    with pytest.raises(RuntimeError, match="Unsupported dtype for cuSPARSELt compressed matrix multiplication"):
        torch._cslt_sparse_mm(torch._cslt_compress(a), torch.ones(128, 8, device=cuda))
