"""Deterministic algorithms: the executor follows the script's switch, CUDA's alerts come at the call, memory is filled."""

import warnings

import pytest
import torch
from torch.nn import functional
from torch.utils import deterministic
from wooly.device import current
from wooly.kernels.alerts import ALERTS
from wooly_wis.determinism import SENSITIVE


@pytest.fixture(autouse=True)
def _off_after():
    yield
    torch.set_deterministic_debug_mode(0)
    deterministic.fill_uninitialized_memory = True


def forms_of(call):
    """The names and encodings of the forms that a call records for the first time."""
    known = current().recorder.forms.known
    before = len(known)
    call()
    return {form.name: form.raw for form in known[before:]}


def test_index_copy_deterministic_equals_cpu(cuda):
    torch.manual_seed(0)
    index, source = torch.randint(0, 7, (200_000,)), torch.randn(200_000)
    torch.use_deterministic_algorithms(True)
    expected = torch.zeros(7).index_copy_(0, index, source)
    for _ in range(2):
        there = torch.zeros(7, device=cuda).index_copy_(0, index.to(cuda), source.to(cuda))
        assert torch.equal(there.cpu(), expected)
    last = torch.stack([source[index == k][-1] for k in range(7)])
    assert torch.equal(expected, last), "a deterministic index_copy keeps the last of equal indices"


def test_form_deterministic_names_only_sensitive_operators(cuda):
    x, index = torch.randn(5, 13, device=cuda), torch.tensor([0, 2], device=cuda)
    source = torch.randn(2, 13, device=cuda)
    calls = {
        "aten.index_copy.default": lambda: x.index_copy(0, index, source),
        "aten.scatter_add.default": lambda: x.scatter_add(0, index.expand(13, 2).T.contiguous(), source),
        "aten.sort.stable": lambda: x.sort(),
    }
    off = {name: forms_of(call).get(name) for name, call in calls.items()}
    torch.use_deterministic_algorithms(True)
    on = {name: forms_of(call).get(name) for name, call in calls.items()}
    assert all(raw is not None and b"deterministic" not in raw for raw in off.values()), off
    assert all(raw is not None and b"deterministic" in raw for name, raw in on.items() if "sort" not in name)
    assert on["aten.sort.stable"] is None, "the form is the same in both modes"
    torch.use_deterministic_algorithms(False)
    assert not any(forms_of(call) for call in calls.values()), "the plans of the first mode are used again"


def grad_of(make, *shape):
    def call(device):
        x = torch.rand(*shape, device=device, requires_grad=True)
        result = make(x)
        torch.use_deterministic_algorithms(True)
        result.sum().backward()

    return call


def on_device(make):
    def call(device):
        torch.use_deterministic_algorithms(True)
        make(device)

    return call


def _bag(x):
    return functional.embedding_bag(torch.zeros(2, 2, dtype=torch.long, device=x.device), x, mode="max")


def _ctc(x):
    target = torch.ones(2, 3, dtype=torch.long, device=x.device)
    return functional.ctc_loss(x.log_softmax(2), target, [9, 9], [3, 3])


LONG = {"dtype": torch.long}
ALERTING = {
    "max_pool3d_with_indices_backward_cuda": grad_of(torch.nn.MaxPool3d(2), 1, 1, 4, 4, 4),
    "kthvalue CUDA": on_device(lambda d: torch.ones(3, device=d).kthvalue(2)),
    "avg_pool3d_backward_cuda": grad_of(torch.nn.AvgPool3d(2), 1, 1, 4, 4, 4),
    "adaptive_avg_pool2d_backward_cuda": grad_of(torch.nn.AdaptiveAvgPool2d(3), 1, 1, 6, 6),
    "adaptive_avg_pool3d_backward_cuda": grad_of(torch.nn.AdaptiveAvgPool3d(3), 1, 1, 6, 6, 6),
    "adaptive_max_pool2d_backward_cuda": grad_of(torch.nn.AdaptiveMaxPool2d(3), 1, 1, 6, 6),
    "fractional_max_pool2d_backward_cuda": grad_of(torch.nn.FractionalMaxPool2d(2, output_ratio=0.5), 1, 1, 6, 6),
    "fractional_max_pool3d_backward_cuda": grad_of(torch.nn.FractionalMaxPool3d(2, output_ratio=0.5), 1, 1, 6, 6, 6),
    "max_unpooling2d_forward_out": on_device(
        lambda d: torch.nn.MaxUnpool2d(2)(torch.ones(1, 1, 2, 2, device=d), torch.zeros(1, 1, 2, 2, device=d, **LONG))
    ),
    "max_unpooling3d_forward_out": on_device(
        lambda d: torch.nn.MaxUnpool3d(2)(
            torch.ones(1, 1, 2, 2, 2, device=d), torch.zeros(1, 1, 2, 2, 2, device=d, **LONG)
        )
    ),
    "upsample_linear1d_backward_out_cuda": grad_of(torch.nn.Upsample(8, mode="linear"), 1, 1, 4),
    "upsample_bilinear2d_backward_out_cuda": grad_of(torch.nn.Upsample(8, mode="bilinear"), 1, 1, 4, 4),
    "upsample_bicubic2d_backward_out_cuda": grad_of(torch.nn.Upsample(8, mode="bicubic"), 1, 1, 4, 4),
    "upsample_trilinear3d_backward_out_cuda": grad_of(torch.nn.Upsample(8, mode="trilinear"), 1, 1, 4, 4, 4),
    "reflection_pad1d_backward_out_cuda": grad_of(torch.nn.ReflectionPad1d(1), 1, 1, 4),
    "reflection_pad2d_backward_cuda": grad_of(torch.nn.ReflectionPad2d(1), 1, 1, 4, 4),
    "reflection_pad3d_backward_out_cuda": grad_of(torch.nn.ReflectionPad3d(1), 1, 1, 4, 4, 4),
    "replication_pad1d_backward_cuda": grad_of(torch.nn.ReplicationPad1d(1), 1, 1, 4),
    "replication_pad2d_backward_cuda": grad_of(torch.nn.ReplicationPad2d(1), 1, 1, 4, 4),
    "replication_pad3d_backward_cuda": grad_of(torch.nn.ReplicationPad3d(1), 1, 1, 4, 4, 4),
    "nll_loss2d_forward_out_cuda_template": on_device(
        lambda d: torch.nn.CrossEntropyLoss(label_smoothing=0.1)(
            torch.rand(1, 3, 2, 2, device=d), torch.zeros(1, 2, 2, device=d, **LONG)
        )
    ),
    "ctc_loss_backward_gpu": grad_of(_ctc, 9, 2, 5),
    "embedding_bag_backward_cuda_max": grad_of(_bag, 4, 3),
    "put_": on_device(
        lambda d: torch.ones(3, device=d).put_(torch.tensor([0], device=d), torch.ones(1, device=d), accumulate=True)
    ),
    "scatter_reduce_cuda_prod_": on_device(
        lambda d: torch.ones(3, device=d).scatter_reduce(
            0, torch.zeros(1, device=d, **LONG), torch.ones(1, device=d), "prod"
        )
    ),
    "index_reduce_cuda": on_device(
        lambda d: torch.ones(3, device=d).index_reduce(
            0, torch.zeros(1, device=d, **LONG), torch.ones(1, device=d), "prod"
        )
    ),
    "_histc_cuda with floating point input": on_device(lambda d: torch.ones(3, device=d).histc()),
    "_bincount_cuda": on_device(lambda d: torch.bincount(torch.ones(3, device=d, **LONG), torch.ones(3, device=d))),
    "median CUDA with indices output": on_device(lambda d: torch.ones(3, device=d).median(0)),
    "grid_sampler_2d_backward_cuda": grad_of(
        lambda x: functional.grid_sample(x, torch.zeros(1, 2, 2, 2, device=x.device), align_corners=False), 1, 1, 3, 3
    ),
    "grid_sampler_3d_backward_cuda": grad_of(
        lambda x: functional.grid_sample(x, torch.zeros(1, 2, 2, 2, 3, device=x.device), align_corners=False),
        *(1, 1, 3, 3, 3),
    ),
}


@pytest.mark.parametrize("name", ALERTING)
def test_operator_without_deterministic_kernel_raises_at_the_call(cuda, name):
    for _ in range(2):
        torch.use_deterministic_algorithms(False)
        with pytest.raises(RuntimeError) as e:
            ALERTING[name](cuda)
        assert str(e.value).startswith(
            f"{name} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'."
        )


def test_alert_wording_equals_the_library(cuda):
    def put(device):
        torch.ones(3, device=device).put_(torch.tensor([0], device=device), torch.ones(1, device=device))

    torch.use_deterministic_algorithms(True)
    said = []
    for device in ("cpu", cuda):
        with pytest.raises(RuntimeError) as e:
            put(device)
        said.append(str(e.value))
    assert said[0] == said[1]


def test_warn_only_warns_each_time_and_computes(cuda):
    torch.use_deterministic_algorithms(True, warn_only=True)
    x = torch.tensor([1.0, 2.0, 2.5], device=cuda)
    for _ in range(3):
        with pytest.warns(UserWarning, match="median CUDA with indices output does not have a deterministic") as found:
            assert x.median(0).values.item() == 2.0
        assert len(found) == 1
    assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_deterministic_debug_mode("default")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert x.median(0).values.item() == 2.0
    torch.set_deterministic_debug_mode("error")
    with pytest.raises(RuntimeError, match="median CUDA"):
        x.median(0)


def test_deterministic_call_with_deterministic_kernel_has_no_alert(cuda):
    torch.use_deterministic_algorithms(True)
    x, index = torch.rand(6, device=cuda), torch.tensor([1, 1], device=cuda)
    assert x.median().item() == x.cpu().median().item()
    assert torch.bincount(index).tolist() == [0, 2]
    assert torch.ones(3, dtype=torch.long, device=cuda).histc(2).sum().item() == 3
    assert torch.equal(x.cumsum(0).cpu(), x.cpu().cumsum(0))
    assert x.scatter_reduce(0, index, x[:2], "sum").shape == (6,)
    assert functional.nll_loss(torch.rand(2, 3, device=cuda), index).isfinite().item()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.bool,
    ],
)
def test_undefined_memory_is_filled_as_on_cpu(cuda, dtype):
    def made(device):
        like = torch.zeros(3, 2, dtype=dtype, device=device)
        yield torch.empty(3, 2, dtype=dtype, device=device)
        yield torch.empty_like(like)
        yield torch.empty_strided((3, 2), (1, 3), dtype=dtype, device=device)
        yield like.new_empty(4)
        yield torch.zeros(2, dtype=dtype, device=device).resize_(5)
        yield torch.zeros(2, dtype=dtype, device=device)

    torch.use_deterministic_algorithms(True)
    for there, here in zip(made(cuda), made("cpu"), strict=True):
        assert torch.equal(there.cpu().isnan(), here.isnan()) and torch.equal(
            there.cpu().nan_to_num(), here.nan_to_num()
        )
    deterministic.fill_uninitialized_memory = False
    assert not torch.empty(3, dtype=dtype, device=cuda).cpu().any()


def test_tables_name_existing_operators():
    for name in {*ALERTS, *SENSITIVE}:
        assert hasattr(torch.ops.aten, name), name


@pytest.mark.filterwarnings("ignore:ctc_loss_backward_gpu")
def test_operator_that_alerts_and_is_not_tried_on_the_host_warns_at_each_call(cuda):
    """The client asks the device about the gradient of CTC at each of these calls."""
    grads = []
    for device in ("cpu", cuda):
        torch.manual_seed(0)
        x = torch.randn(12, 2, 5).log_softmax(-1).to(device).requires_grad_()
        loss = torch.nn.functional.ctc_loss(x, torch.ones(2, 3, dtype=torch.long, device=device), [12, 12], [3, 2])
        if device == "cpu":
            loss.backward()
            grads.append(x.grad)
            continue
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            for _ in range(3):
                x.grad = None
                with pytest.warns(UserWarning, match="ctc_loss_backward_gpu does not have a deterministic"):
                    loss.backward(retain_graph=True)
                grads.append(x.grad.cpu())
            torch.use_deterministic_algorithms(True)
            with pytest.raises(RuntimeError, match="ctc_loss_backward_gpu does not have a deterministic"):
                loss.backward(retain_graph=True)
        finally:
            torch.use_deterministic_algorithms(False)
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0])
