"""Mixed precision: each operator of CUDA's lists gives CUDA's dtypes, and the same numbers as explicit casts."""

import json
import os
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._higher_order_ops import scan, while_loop
from torch._ops import HigherOrderOperator
from torch.nn.attention.flex_attention import flex_attention
from wooly.kernels import autocast as lists
from wooly_testkit import forks

CASES_FILE = Path(__file__).with_name("autocast_cases.py")
cases = SimpleNamespace(**runpy.run_path(str(CASES_FILE)))


@pytest.fixture(scope="module")
def oracle(cuda):
    """Result dtypes of PyTorch's own CUDA autocast, from a process without the Wooly device.

    It depends on `cuda`, because the executor of `cuda` is a fork, and the process that forks has imported PyTorch then.
    """
    done = forks.run(CASES_FILE.stem, env=os.environ | {"PYTHONPATH": str(CASES_FILE.parent)}, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_lists_equal_cuda():
    ours = {*lists.LOWER, *lists.FULL, *lists.FULL_RESULT, *lists.FULL_RESULT_OVERLOAD, *lists.PROMOTE, lists.BANNED}
    theirs = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    # cuDNN's own operators are listed in builds for CUDA only; operators of later releases are not in these lists. Torch 2.11
    # also has overloads with names of dimensions: the device does not offer named tensors.
    more = {name for name in theirs - ours if not re.search(r"\.(dimname|names_|dim_Dimname|Dimname)", name)}
    assert more <= {"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"}
    known = {name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names()}
    assert (ours - theirs) & known <= {"rms_norm"}  # torch 2.11's lists do not have it, so it is not registered there
    assert (ours & known) - cases.NOT_CALLED <= set(cases.CALLS)


def test_autocast_listed_operator_has_dtypes_of_cuda(cuda, oracle):
    ours = cases.dtypes(cuda)
    for name, like in cases.LIKE.items():
        for key in [k for k in oracle if k.startswith(f"{name} of ")]:
            if oracle[key] is None:  # a build without CUDA cannot tell
                oracle[key] = oracle[key.replace(name, like, 1)]
    differing = {k: (ours[k], v) for k, v in oracle.items() if ours[k] != v}
    assert differing == {}


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_network_always_runs_in_float16(cuda, make):
    # CUDA's autocast kernel for recurrent networks always casts to float16 and ignores the setting.
    net = make(4, 5).to(cuda)
    for lower in (torch.float16, torch.bfloat16):
        with torch.autocast(cuda, lower):
            assert net(torch.ones(3, 2, 4, device=cuda))[0].dtype == torch.float16
    assert net(torch.ones(3, 2, 4, device=cuda))[0].dtype == torch.float32


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells_equal_cpu(cuda, make):
    def run(device):
        torch.manual_seed(4)
        cell, x, state = make(8, 6).to(device), torch.randn(5, 8).to(device), None
        for _ in range(3):
            state = cell(x, state)
        out = state[0] if isinstance(state, tuple) else state
        out.square().sum().backward()
        return [out.detach().cpu(), *(p.grad.cpu() for p in cell.parameters())]

    for ours, theirs in zip(run(cuda), run("cpu"), strict=True):
        assert torch.equal(ours, theirs)


def test_autocast_state_reports_cuda(cuda):
    assert not torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.float16
    with torch.autocast("cuda", torch.bfloat16) as region:
        assert region.device == "cuda" and region.fast_dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            x = torch.ones(2, 2, device=cuda)
            assert (x @ x).dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
        assert (x @ x).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.float16
    assert (x @ x).dtype == torch.float32


def test_autocast_other_thread_is_not_in_region(cuda):
    from concurrent.futures import ThreadPoolExecutor

    x = torch.ones(2, 2, device=cuda)
    with torch.autocast("cuda"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (x @ x).dtype).result() == torch.float32


def test_autocast_older_apis_work(cuda):
    x = torch.ones(2, 2, device=cuda)
    with pytest.warns(FutureWarning), torch.cuda.amp.autocast(dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16

    @torch.autocast("cuda")
    def decorated():
        return x @ x

    assert decorated().dtype == torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == torch.float32 and (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_autocast_mixed_short_dtypes_raise_error_of_cuda(cuda):
    a, b = torch.ones(2, dtype=torch.float16, device=cuda), torch.ones(2, dtype=torch.bfloat16, device=cuda)
    with torch.autocast("cuda"):
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType in at::autocast::prioritize"):
            torch.dot(a, b)
        with pytest.raises(RuntimeError, match="are unsafe to autocast"):
            nn.functional.binary_cross_entropy(a.sigmoid(), a)


def test_weight_is_cast_once_per_region(cuda):
    weight, x = torch.ones(2, 2, device=cuda, requires_grad=True), torch.ones(2, 2, device=cuda)
    with torch.autocast("cuda"):
        a = x @ weight
        with torch.no_grad():
            weight.mul_(2)
        assert (x @ weight).tolist() == a.tolist()  # CUDA keeps the first cast, too
        with torch.autocast("cuda", cache_enabled=False):
            assert (x @ weight).tolist() == (a * 2).tolist()
    with torch.autocast("cuda"):
        assert (x @ weight).tolist() == (a * 2).tolist()


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_weight_has_gradient_after_first_use_without_gradients(cuda, first):
    weight, x = torch.ones(2, 3, device=cuda, requires_grad=True), torch.ones(4, 2, device=cuda)
    with torch.autocast("cuda"):
        with first():
            before = x @ weight
        after = x @ weight
        with torch.no_grad():
            last = x @ weight
    assert before.requires_grad is (first is torch.enable_grad) and after.requires_grad and not last.requires_grad
    after.float().sum().backward()
    assert weight.grad.tolist() == [[4.0] * 3] * 2
    assert before.tolist() == after.tolist() == last.tolist() == [[2.0] * 3] * 4


def by_hand(model, x, lower):
    """The network below with explicit casts instead of autocast."""
    first, norm, last = model[0], model[1], model[3]
    h = nn.functional.linear(x.to(lower), first.weight.to(lower), first.bias.to(lower))
    h = nn.functional.layer_norm(h.float(), norm.normalized_shape, norm.weight, norm.bias)
    return nn.functional.linear(torch.relu(h).to(lower), last.weight.to(lower), last.bias.to(lower))


@pytest.mark.parametrize("lower", [torch.float16, torch.bfloat16])
def test_training_under_autocast_equals_explicit_casts_on_cpu(cuda, lower):
    def losses(device, autocast):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3)).to(device)
        x, y = torch.randn(40, 12).to(device), torch.randint(0, 3, (40,)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        found = []
        for _ in range(5):
            with torch.autocast("cuda", lower, enabled=autocast):
                if autocast:
                    loss = nn.functional.cross_entropy(model(x), y)
                else:  # ATen's cross entropy passes the dtype of its input to the softmax
                    loss = nn.functional.nll_loss(by_hand(model, x, lower).log_softmax(1).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    ours = losses(cuda, True)
    assert ours == losses("cpu", False) and ours[-1] < ours[0]


class Doubled(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        assert not torch.is_autocast_enabled("cuda")
        return x @ x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        assert not torch.is_autocast_enabled("cuda")
        return grad * 2


def test_custom_function_gets_cast_inputs(cuda):
    x = torch.ones(2, 2, dtype=torch.float16, device=cuda, requires_grad=True)
    with torch.autocast("cuda"):
        y = Doubled.apply(x)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad.dtype == torch.float16 and x.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_autocast_of_cpu_does_not_hold_for_device(cuda):
    """As on CUDA. The shapes are new, so the calls are inferred and tried on host tensors."""
    lstm = nn.LSTM(13, 11).to(cuda)
    x = torch.randn(5, 1, 13, device=cuda)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [lstm(x)[0], x[:, 0] @ x[:, 0].T, nn.functional.linear(x, lstm.weight_ih_l0)]
        with pytest.raises(RuntimeError, match="dtype"):
            nn.functional.linear(x, lstm.weight_ih_l0.detach().bfloat16())
    assert [y.dtype for y in results] == [torch.float32] * 3
    assert torch.equal(lstm(x)[0], results[0])


def _while(x):
    return while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t * 2), (torch.zeros((), device=x.device), x))[1]


#: Operators on functions, whose functions are compiled at their call.
ON_FUNCTIONS = {
    "cond": lambda x: torch.cond(x.sum() > 0, lambda t: t @ t, lambda t: t.mm(t), (x,)),
    "while_loop": _while,
    "scan": lambda x: scan(lambda c, t: (c + t, c * t), x[0].clone(), x, dim=0)[0],
    "flex_attention": lambda x: flex_attention(*[x.expand(1, 2, 4, 4)] * 3),
    "compiled": lambda x: torch.compile(flex_attention)(*[x.expand(1, 2, 4, 4)] * 3),
}


@pytest.mark.parametrize("name", ON_FUNCTIONS)
@pytest.mark.filterwarnings("ignore")
def test_operator_on_functions_under_autocast_equals_cpu(cuda, name):
    """The CPU's autocast has the same rules for these operators as CUDA's.

    The CPU does not compile the attention: its compiler would run a C++ compiler for 20 seconds.
    """
    x = torch.arange(16.0).reshape(4, 4) / 16
    found = []
    for t, work in (
        (x, ON_FUNCTIONS["flex_attention" if name == "compiled" else name]),
        (x.to(cuda), ON_FUNCTIONS[name]),
    ):
        torch._dynamo.reset()
        with torch.autocast(t.device.type, torch.bfloat16):
            found.append(work(t))
    assert found[1].dtype is found[0].dtype and found[1].device.type == "cuda"
    torch.testing.assert_close(found[1].cpu(), found[0])


def test_kernel_of_an_operator_on_functions_for_cudas_autograd_is_called(cuda):
    class Doubling(HigherOrderOperator):
        def __call__(self, t):
            return super().__call__(t)

    double = Doubling("wooly_test_doubling")
    key = torch._C.DispatchKey
    double.py_impl(key.AutogradCUDA)(lambda t: t * 2)
    x = torch.ones(3, device=cuda, requires_grad=True)
    double(x).sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    double.py_impl(key.AutogradPrivateUse1)(lambda t: t * 3)  # a script's own kernel for the device
    assert double(x).tolist() == [3.0] * 3
    with pytest.raises(RuntimeError, match="override a python impl"):
        double.py_impl(key.AutogradPrivateUse1)(lambda t: t)
