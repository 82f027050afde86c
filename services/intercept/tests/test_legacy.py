"""The old tensor types of `torch.cuda`."""

import numpy as np
import pytest
import torch
import torch._dynamo
from wooly.facade.legacy import KINDS

pytestmark = pytest.mark.filterwarnings("ignore:.*set_default_tensor_type:UserWarning")


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_type_makes_tensors_on_device(cuda, kind):
    make, host = getattr(torch.cuda, f"{kind}Tensor"), getattr(torch, f"{kind}Tensor")
    for t, shape in ((make(), (0,)), (make(2, 3), (2, 3)), (make(torch.Size([4])), (4,)), (make([1, 0]), (2,))):
        assert t.device == torch.device("cuda:0") and t.dtype is KINDS[kind] and t.shape == shape
    t = make([1, 0])
    assert t.type() == f"torch.cuda.{kind}Tensor" and t.tolist() == host([1, 0]).tolist()
    assert isinstance(t, make) and not isinstance(t, host)
    assert isinstance(t.cpu(), host) and not isinstance(t.cpu(), make)
    assert torch.equal(make(t), t)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # of PyTorch 2.11
def test_sparse_tensor_type_makes_sparse_tensors_on_device(cuda):
    make, indices, values = (
        torch.cuda.sparse.FloatTensor,
        torch.tensor([[0, 2]], device=cuda),
        torch.ones(2, device=cuda),
    )
    for t, shape in (
        (make(indices, values), (3,)),
        (make(indices, values, (4,)), (4,)),
        (make(), (0,)),
        (make(2, 3), (2, 3)),
        (make(torch.Size([2])), (2,)),
    ):
        assert t.is_cuda and t.is_sparse and t.shape == shape and t.type() == "torch.cuda.sparse.FloatTensor"
        assert isinstance(t, make) and not isinstance(t, torch.cuda.FloatTensor) and not isinstance(t.cpu(), make)
    assert make(indices, values, (4,)).to_dense().tolist() == [1, 0, 1, 0]
    assert make(indices, values.double()).dtype is torch.float64
    assert not isinstance(values, make) and values.type(torch.cuda.sparse.HalfTensor).dtype is torch.float16


def test_tensor_type_as_argument_of_type_converts_and_moves(cuda):
    x = torch.ones(2)
    for to in (torch.cuda.HalfTensor, "torch.cuda.HalfTensor"):
        moved = x.type(to)
        assert moved.is_cuda and moved.dtype is torch.float16
        assert moved.type(torch.FloatTensor).device.type == "cpu"
        assert moved.type(torch.int32).is_cuda


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (
            lambda: torch.cuda.FloatTensor(torch.ones(2)),
            TypeError,
            r"expected torch.cuda.FloatTensor \(got torch.FloatTensor\)",
        ),
        (
            lambda: torch.cuda.FloatTensor(2, device="cpu"),
            RuntimeError,
            "expects device type: cuda but device type: cpu",
        ),
        (lambda: torch.set_default_tensor_type(torch.cuda.LongTensor), TypeError, "only floating-point types"),
        (lambda: torch.set_default_tensor_type(torch.cuda.sparse.FloatTensor), TypeError, "only dense types"),
        (lambda: torch.cuda.sparse.FloatTensor([2, 3]), TypeError, "only accepts sizes"),
        (lambda: torch.cuda.sparse.FloatTensor(2, device="cpu"), RuntimeError, "but device type: cpu"),
    ],
)
def test_tensor_type_with_wrong_argument_raises(cuda, make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_default_tensor_type_sets_device_and_dtype(cuda):
    try:
        for kind in (torch.cuda.DoubleTensor, "torch.cuda.DoubleTensor"):
            torch.set_default_tensor_type(kind)
            assert torch.zeros(2).is_cuda and torch.tensor([1.0]).dtype is torch.float64
            torch.set_default_tensor_type(torch.FloatTensor)
            assert not torch.zeros(2).is_cuda and torch.tensor([1.0]).dtype is torch.float32
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_constructor_of_tensor_makes_tensors_of_default_type(cuda):
    class Named(torch.Tensor):
        pass

    try:
        torch.set_default_tensor_type(torch.cuda.FloatTensor)
        for made, shape in (
            (torch.Tensor([1, 2]), (2,)),
            (torch.Tensor(np.ones(3)), (3,)),
            (torch.Tensor(2, 3), (2, 3)),
            (torch.Tensor(np.int64(2), 3), (2, 3)),
            (torch.Tensor(np.int64(3)), (3,)),
            (torch.Tensor(torch.Size([4])), (4,)),
            (torch.Tensor(), (0,)),
            (Named([1, 2]), (2,)),
        ):
            assert made.is_cuda and made.dtype is torch.float32 and made.shape == shape
        assert type(Named([1.0])) is Named and Named([1.0]).tolist() == [1.0]
        x = torch.ones(2)
        assert torch.Tensor(x).data_ptr() == x.data_ptr()
        with pytest.raises(RuntimeError, match="expects device type: cuda but device type: cpu"):
            torch.Tensor([1.0], device="cpu")
        # The import of Dynamo, of which each optimizer has need, does this and refuses other signatures.
        torch._dynamo.substitute_in_graph(torch.Tensor.__new__)(lambda cls, data, requires_grad=False, **kwargs: None)
        layer = torch.nn.Linear(2, 3)
        layer(torch.Tensor([[1, 2]])).sum().backward()
        assert layer.weight.grad.tolist() == [[1.0, 2.0]] * 3
        torch.set_default_dtype(torch.float64)
        assert torch.Tensor([1]).dtype is torch.float64 and torch.Tensor([1]).is_cuda
        torch.set_default_tensor_type(torch.FloatTensor)
        assert torch.Tensor([1]).device.type == Named([1]).device.type == "cpu"
        assert torch.Tensor(2, 3).shape == (2, 3)
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
