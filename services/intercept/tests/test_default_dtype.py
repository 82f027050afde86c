"""`torch.set_default_dtype`: integers are promoted to the default dtype of this process, not to that of the executor's."""

import pytest
import torch
from wooly import api, device

pytestmark = pytest.mark.connected

#: Calls on a tensor of integers and a mask. The result's dtype, or how it is computed, depends on the default dtype.
CALLS = {
    "quotient": lambda x, m: x / 3,
    "sum with fraction": lambda x, m: x + 0.1,
    "reflected power": lambda x, m: 0.7**x,
    "mask times fraction": lambda x, m: m * 0.1,
    "unary function": lambda x, m: x.sin(),
    "two integers": lambda x, m: torch.atan2(x, x.flip(0)),
    "list": lambda x, m: torch._foreach_div([x, x + 1], 3)[1],
    "complex": lambda x, m: (x + 0.1j).real,
    "out": lambda x, m: torch.div(x, 3, out=torch.empty(x.shape, dtype=torch.float64, device=x.device)),
    "comparison": lambda x, m: x * 16777217 > 16777216.5,
    "clamp": lambda x, m: x.clamp(min=1.1),
    "choice": lambda x, m: torch.where(m, x, 0.1),
    "integers only": lambda x, m: x.masked_fill(m, 2.0) + x // 2,
    "window": lambda x, m: torch.kaiser_window(5, device=x.device),
    "range": lambda x, m: torch.arange(0, 1, 0.3, device=x.device),
}


@pytest.fixture
def default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", CALLS)
def test_result_of_integers_in_each_default_dtype_equals_cpu(cuda, default_dtype, name):
    x = torch.arange(1, 6)
    if name == "complex" and api._attached.link.device["torch_version"] != torch.__version__.partition("+")[0]:
        pytest.skip("which complex type belongs to bfloat16 depends on the release of PyTorch")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        default_dtype(dtype)
        local = CALLS[name](x, x > 2)
        ours = CALLS[name](x.to(cuda), (x > 2).to(cuda))
        assert ours.dtype is local.dtype and torch.equal(ours.cpu(), local), dtype


def test_change_of_default_dtype_needs_other_plans_and_setting_it_again_does_not(cuda, default_dtype):
    x = torch.arange(3, device=cuda)
    inferences = device.current().generic.inferences
    assert (x / 7).dtype is torch.float32
    before = inferences.on_meta
    default_dtype(torch.float32)
    assert (x / 7).dtype is torch.float32 and inferences.on_meta == before
    default_dtype(torch.float64)
    assert (x / 7).dtype is torch.float64 and inferences.on_meta > before


def test_plans_of_a_default_dtype_are_kept_while_another_one_is_set(cuda, default_dtype):
    x, out = torch.arange(3.0, device=cuda), torch.empty(3, device=cuda)
    integers = torch.arange(3, device=cuda)
    inferences = device.current().generic.inferences

    def new_inferences(dtype):
        default_dtype(dtype)
        before = inferences.on_meta
        assert (x / 7).dtype is torch.float32 and torch.equal(torch.mul(x, 3, out=out), x * 3)
        new = inferences.on_meta - before
        assert (integers / 7).dtype is dtype
        return new

    assert new_inferences(torch.float64) > 0
    new_inferences(torch.float32)
    assert [new_inferences(d) for d in (torch.float64, torch.float32, torch.float64)] == [0, 0, 0]


def test_call_that_cannot_be_converted_raises_not_implemented_error(cuda, default_dtype, monkeypatch):
    from wooly.kernels import promotion

    monkeypatch.setattr(promotion, "_gives", lambda *args: False)
    default_dtype(torch.float64)
    with pytest.raises(NotImplementedError, match=r"default dtype is torch.float64.*convert the integers first"):
        torch.arange(3, device=cuda) / 7


@pytest.mark.parametrize("number", [-1, 300])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool])
def test_number_that_an_integer_dtype_lacks_stays_itself_where_results_are_fractions(cuda, dtype, number):
    """uint8 would make 255 of -1, and refuse 300."""
    for function in (torch.copysign, torch.xlogy, torch.special.xlog1py, torch.special.chebyshev_polynomial_t):
        for x in (torch.tensor([1, 3]).to(dtype), torch.tensor(1).to(dtype)):
            expected, found = function(x, number), function(x.to(cuda), number).cpu()
            assert found.dtype == expected.dtype and torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
