"""Operators on sparse tensors on the executor: indices that a client invents reach no kernel."""

import pytest
import torch
from wooly_executor.errors import OperationError
from wooly_executor.runtime.sparse import operators
from wooly_wis.sparse import Dense, DenseResult, Layout, Sparse, SparseCall, SparseTextError, Written, results_text

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support", "ignore:Sparse invariant checks")
DENSE = torch.arange(9.0).reshape(3, 3)
ONE = results_text([DenseResult((3, 3), (3, 1), "f32")])


def coo(indices, size=(3, 3), coalesced=False):
    return Sparse(Layout.COO, size, (0,), 1, coalesced), [torch.tensor(indices), torch.ones(len(indices[0]))]


def csr(starts, columns, layout=Layout.CSR, values=None):
    held = [torch.tensor(starts), torch.tensor(columns), torch.ones(len(columns)) if values is None else values]
    return Sparse(layout, (3, 3), (0, 1), 2, False), held


def product(given, results=ONE):
    sparse, tensors = given
    call = SparseCall("aten.mm.default", (sparse, Dense(len(tensors))), ())
    return operators.dense(call.text(), results, [*tensors, DENSE], [])[0]


def test_product_of_valid_components_equals_dense_product():
    dense = torch.zeros(3, 3)
    dense[[0, 1, 2], [2, 0, 2]] = 1
    assert torch.equal(product(coo([[0, 1, 2], [2, 0, 2]], coalesced=True)), dense @ DENSE)
    assert torch.equal(product(csr([0, 1, 2, 3], [2, 0, 2])), dense @ DENSE)
    assert torch.equal(product(csr([0, 1, 1, 3], [1, 0, 2], Layout.CSC)), dense @ DENSE)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (coo([[0, 3], [0, 0]]), "index out of range: dimension 0 has size 3"),
        (coo([[0, -1], [0, 0]]), "index out of range: dimension 0 has size 3, but the indices go from -1"),
        (coo([[0, 1], [0, 1 << 40]]), "index out of range: dimension 1"),
        (coo([[1, 0], [0, 0]], coalesced=True), "not sorted or not distinct"),
        (coo([[1, 1], [0, 0]], coalesced=True), "not sorted or not distinct"),
        (coo([[0, 1], [0, 1]], size=(3,)), "dimensions of indices and values are not those of the size"),
        ((coo([[0], [0]])[0], [torch.tensor([[0], [0]]), torch.ones(5)]), "there are 1 indices, but"),
        ((coo([[0], [0]])[0], [torch.tensor([[0.0], [0.0]]), torch.ones(1)]), "int64"),
        (csr([0, 1, 2, 9], [2, 0, 2]), "must go from 0 to 3, but go from 0 to 9"),
        (csr([0, 9, -6, 3], [2, 0, 2]), "a row must have 0 to 3 elements"),
        (csr([0, 2, 2, 3], [2, 3, 0]), "index out of range: the plain indices"),
        (csr([0, 1, 3], [2, 0, 2]), "there must be 4 compressed indices"),
        (csr([0, 1, 2, 3], [2, 0, 3]), "index out of range: the plain indices"),
        (csr([0, 1, 2, 3], [2, 0, 2], values=torch.ones(7)), "there are 3 indices, but .7. values"),
        ((Sparse(Layout.COO, (3, 3), (8,), 1, False), coo([[0], [0]])[1]), "a tensor that the call does not have"),
    ],
)
def test_invalid_components_are_refused_before_any_kernel(given, reason):
    with pytest.raises((RuntimeError, OperationError), match=reason):
        product(given)


@pytest.mark.parametrize("layout", [Layout.CSR, Layout.CSC])
@pytest.mark.parametrize("columns", [[2, 0, 2], [1, 1, 2], [2, 2, 2]])
def test_plain_indices_in_any_order_give_product_and_dense_tensor(layout, columns):
    rows = [0, 0, 2]
    at = [rows, columns] if layout is Layout.CSR else [columns, rows]
    values = torch.tensor([1.0, 2.0, 4.0])
    expected = torch.zeros(3, 3).index_put([torch.tensor(a) for a in at], values, accumulate=True)
    sparse, held = csr([0, 2, 2, 3], columns, layout, values)
    assert torch.equal(product((sparse, held)), expected @ DENSE)
    found = operators.dense(SparseCall("aten._to_dense.default", (sparse,), ()).text(), ONE, held, [])
    assert torch.equal(found[0], expected)


def test_row_with_more_elements_than_columns_gives_product():
    sparse, held = csr([0, 5, 5, 5], [1, 1, 1, 1, 1])
    assert product((sparse, held)).tolist() == [[15, 20, 25], [0, 0, 0], [0, 0, 0]]


def squared(columns):
    """The product of a sparse matrix with itself, as the components of the result."""
    _, held = csr([0, 2, 2, 3], columns, values=torch.tensor([1.0, 2.0, 4.0]))
    twice = (Sparse(Layout.CSR, (3, 3), (0, 1), 2, False), Sparse(Layout.CSR, (3, 3), (0, 1), 2, False))
    return operators.sparse(SparseCall("aten.mm.default", twice, ()).text(), held, [])


def test_product_of_two_sparse_matrices_sorts_their_rows():
    starts, columns, values, _ = squared([2, 0, 2])
    assert (starts.tolist(), columns.tolist(), values.tolist()) == ([0, 2, 2, 3], [0, 2, 2], [4, 6, 16])


def test_product_of_two_sparse_matrices_adds_elements_of_one_index():
    starts, columns, values, _ = squared([0, 0, 2])
    assert (starts.tolist(), columns.tolist(), values.tolist()) == ([0, 1, 1, 2], [0, 2], [9, 16])
    starts, columns, values, _ = squared([2, 2, 2])
    assert (starts.tolist(), columns.tolist(), values.tolist()) == ([0, 1, 1, 2], [2, 2], [12, 16])


@pytest.mark.parametrize("operator", ["aten.sparse_sampled_addmm.default", "aten._to_sparse_csc.default"])
def test_operators_that_need_order_refuse_unsorted_rows(operator):
    sparse, held = csr([0, 2, 2, 3], [2, 0, 2])
    dense = (Dense(3), Dense(3)) if "addmm" in operator else ()
    with pytest.raises((RuntimeError, OperationError), match="not sorted or not distinct"):
        operators.sparse(SparseCall(operator, (sparse, *dense), ()).text(), [*held, DENSE], [])


def batch(starts, columns, operator="aten._to_dense.default", size=(2, 2, 3), values=None):
    """The dense tensor of a batch of two matrices."""
    held = [torch.tensor(starts), torch.tensor(columns)]
    held.append(torch.arange(1.0, 5.0).reshape(2, 2) if values is None else values)
    call = SparseCall(operator, (Sparse(Layout.CSR, size, (0, 1), 2, False),), ())
    return operators.dense(call.text(), results_text([DenseResult((2, 2, 3), (6, 3, 1), "f32")]), held, [])[0]


def test_batch_of_compressed_matrices_becomes_dense():
    found = batch([[0, 1, 2], [0, 0, 2]], [[2, 0], [0, 1]])
    assert found.tolist() == [[[0, 0, 1], [2, 0, 0]], [[0, 0, 0], [3, 4, 0]]]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (([[0, 1, 2], [0, 0, 3]], [[2, 0], [0, 1]]), "must go from 0 to 2, but go from 0 to 3"),
        (([[0, 1, 2], [1, 1, 2]], [[2, 0], [0, 1]]), "must go from 0 to 2, but go from 0 to 2"),
        (([[0, 1, 2], [0, 5, 2]], [[2, 0], [0, 1]]), "a row must have 0 to 2 elements"),
        (([[0, 1, 2], [0, 0, 2]], [[2, 0], [0, 3]]), "index out of range: the plain indices"),
        (([[0, 1, 2], [0, 0, 2]], [[2, 0], [1, 1]], "aten._to_sparse_csc.default"), "not sorted or not distinct"),
        (([[0, 1, 2]], [[2, 0], [0, 1]]), "must have the same batch"),
        (([[0, 1, 2], [0, 0, 2]], [[2, 0], [0, 1]], "aten._to_dense.default", (3, 2, 3)), "the size must begin with"),
        (([[0, 1, 2], [0, 0, 2]], [[2, 0], [0, 1]], "aten.mv.default"), "the operator takes no batches"),
        (
            ([[0, 1, 2], [0, 0, 2]], [[2, 0], [0, 1]], "aten._to_dense.default", (2, 2, 3), torch.ones(2, 3)),
            "but .3. values",
        ),
    ],
)
def test_invalid_batch_is_refused_before_any_kernel(given, reason):
    with pytest.raises((RuntimeError, OperationError), match=reason):
        batch(*given)


def test_batch_masks_a_dense_tensor_and_no_sparse_one():
    held = [torch.tensor([[0, 1, 2], [0, 0, 2]]), torch.tensor([[2, 0], [0, 1]]), torch.ones(2, 2)]
    held.append(torch.arange(12.0).reshape(2, 2, 3))
    mask = Sparse(Layout.CSR, (2, 2, 3), (0, 1), 2, False)
    found = operators.sparse(SparseCall("aten.sparse_mask.default", (Dense(3), mask), ()).text(), held, [])
    assert found[2].tolist() == [[2, 3], [9, 10]]
    with pytest.raises((RuntimeError, OperationError), match="the operator takes no batches"):
        operators.sparse(SparseCall("aten.sparse_mask.default", (mask, mask), ()).text(), held, [])
    held[1] = torch.tensor([[2, 0], [0, 7]])
    with pytest.raises((RuntimeError, OperationError), match="index out of range"):
        operators.sparse(SparseCall("aten.sparse_mask.default", (Dense(3), mask), ()).text(), held, [])


def test_result_unlike_announced_is_refused():
    with pytest.raises((RuntimeError, OperationError), match="announced"):
        product(coo([[0], [0]]), results_text([DenseResult((9, 9), (9, 1), "f32")]))


def test_operator_outside_the_list_is_refused():
    with pytest.raises(SparseTextError, match="not one of the operators"):
        operators.dense('["aten.from_file.default",["/etc/passwd"],[]]', ONE, [], [])


def test_written_tensor_may_not_be_an_index_and_must_be_said():
    sparse, tensors = coo([[0, 1], [0, 1]])
    call = SparseCall("aten.add_.Tensor", (Written(), sparse), ())
    target = torch.zeros(3, 3)
    operators.update(call.text(), target, tensors, [])
    assert target.sum() == 2
    shared = torch.zeros(9, dtype=torch.int64)
    indices = shared[:4].view(2, 2)
    with pytest.raises((RuntimeError, OperationError), match="must not share memory with the indices"):
        operators.update(call.text(), shared.view(3, 3), [indices, torch.ones(2, dtype=torch.int64)], [])
    unsaid = SparseCall("aten.add_.Tensor", (Dense(2), sparse), ())
    with pytest.raises((RuntimeError, OperationError), match="writes"):
        operators.dense(unsaid.text(), ONE, [*tensors, DENSE], [])
