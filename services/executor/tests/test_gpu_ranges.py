"""Operands that are out of range on a GPU: tested on the CPU's library, which raises if one of them still reaches it."""

import math

import pytest
import torch
from wooly_executor.runtime.gpu_ranges import _RULES, in_range
from wooly_testkit.tape import Tape
from wooly_wis.dtypes import DType
from wooly_wis.externs import allowed

from services.executor.tests.fake_gpu import FakeDriver, gpu_runtime
from services.executor.tests.test_gpu_runtime import Side, same

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")

aten, F32, I64, nan = torch.ops.aten, DType.F32, DType.I64, math.nan


def ints(*values):
    return torch.tensor(values)


def x(*sizes):
    return torch.arange(1.0, 1 + math.prod(sizes)).reshape(sizes)


#: Operator, arguments, index of the replaced argument, and its replacement, which is out of range.
CASES = [
    (aten.index.Tensor, (x(3, 4), [None, ints(0, -4, 3)]), 1, [None, ints(0, 4)]),
    (aten.index.Tensor, (x(3, 4), [ints(2, 0), ints(-1, 1)]), 1, [ints(2, -4), ints(-1, 1)]),
    (aten.index.Tensor, (x(2, 3, 4), [torch.ones(2, 3, dtype=torch.bool), ints(3)]), 1, [x(2, 3) > 0, ints(-5)]),
    (aten._index_put_impl_.default, (x(4), [ints(1)], x(1), True), 1, [ints(4)]),
    (aten.index_select.default, (x(5, 3), -1, ints(0, 2)), 2, ints(0, 3)),
    (aten.index_select.default, (torch.tensor(2.0), 0, ints(0)), 2, ints(-1)),
    (aten.index_add_.default, (x(4), 0, ints(3, 0), x(2)), 2, ints(3, 4)),
    (aten.index_copy.default, (x(4, 2), 0, ints(3), x(1, 2)), 2, ints(-1)),
    (aten.index_reduce_.default, (x(4), 0, ints(3), x(1), "prod"), 2, ints(9)),
    (aten.index_fill_.int_Scalar, (x(4), 0, ints(3, -4), 0.5), 2, ints(-5)),
    (aten.gather.default, (x(2, 3), 1, ints([0, 2], [1, 1])), 2, ints([0, 3], [1, 1])),
    (aten.scatter.src, (x(4), 0, ints(3, 1), x(2)), 2, ints(3, -1)),
    (aten.scatter_.value, (x(4), 0, ints(3), 2.0), 2, ints(4)),
    (aten.scatter_add.default, (x(4), 0, ints(3), x(1)), 2, ints(2**40)),
    (aten.scatter_reduce.two, (x(4), 0, ints(3), x(1), "amax"), 2, ints(4)),
    (aten.take.default, (x(2, 3), ints(5, -6)), 1, ints(6)),
    (aten.put_.default, (x(4), ints(-4), x(1)), 1, ints(-5)),
    (aten.embedding.default, (x(5, 2), ints([4, 0])), 1, ints([5, 0])),
    (aten.embedding_renorm_.default, (x(5, 2), ints(4, 0), 1.0, 2.0), 1, ints(4, -1)),
    (aten.embedding_dense_backward.default, (x(2, 3), ints(1, 4), 5, -1, False), 1, ints(1, 5)),
    (aten.nll_loss_forward.default, (x(3, 4), ints(0, -100, 3), None, 1, -100), 1, ints(0, -100, 4)),
    (aten.nll_loss_forward.default, (x(4), torch.tensor(3), None, 1, -100), 1, torch.tensor(-1)),
    (aten.nll_loss2d_forward.default, (x(1, 4, 1, 2), ints([[0, 3]]), None, 0, -1), 1, ints([[0, 4]])),
    (aten.cross_entropy_loss.default, (x(2, 4), ints(0, 3)), 1, ints(0, 4)),
    (aten.cross_entropy_loss.default, (x(2, 4), x(2, 4)), None, None),
    (aten.multi_margin_loss.default, (x(2, 4), ints(0, 3)), 1, ints(-1, 3)),
    (aten.multilabel_margin_loss_forward.default, (x(1, 3), ints([2, -1, 0]), 1), 1, ints([3, -1, 0])),
    (
        aten.nll_loss_backward.default,
        (x(1), x(3, 4), ints(0, -100, 3), None, 1, -100, torch.tensor(2.0)),
        2,
        ints(0, -100, 4),
    ),
    (
        aten.nll_loss2d_backward.default,
        (x(1, 1, 2), x(1, 4, 1, 2), ints([[0, 3]]), None, 0, -1, torch.tensor(2.0)),
        2,
        ints([[0, -2]]),
    ),
    (aten.multi_margin_loss_backward.default, (x(1), x(2, 4), ints(0, 3), 1, 1, None, 1), 2, ints(-1, 3)),
    (
        aten.multilabel_margin_loss_backward.default,
        (x(1), x(1, 3), ints([2, -1, 0]), 1, torch.tensor([[1.0, 0.0, 1.0]])),
        2,
        ints([3, -1, 0]),
    ),
    (
        aten.max_pool2d_with_indices_backward.default,
        (x(1, 1, 2), x(1, 2, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, ints([[0, 7]])),
        7,
        ints([[0, 8]]),
    ),
    (
        aten.max_pool3d_with_indices_backward.default,
        (x(1, 1, 1, 2), x(1, 2, 2, 4), [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, ints([[[0, 15]]])),
        7,
        ints([[[0, -1]]]),
    ),
    (aten.adaptive_max_pool2d_backward.default, (x(1, 1, 2), x(1, 2, 4), ints([[0, 7]])), 2, ints([[0, 8]])),
    (
        aten.adaptive_max_pool3d_backward.default,
        (x(1, 1, 1, 2), x(1, 2, 2, 4), ints([[[0, 15]]])),
        2,
        ints([[[0, 16]]]),
    ),
    (
        aten.fractional_max_pool2d_backward.default,
        (x(1, 1, 2), x(1, 2, 4), [2, 2], [1, 2], ints([[0, 7]])),
        4,
        ints([[0, 8]]),
    ),
    (
        aten.fractional_max_pool3d_backward.default,
        (x(1, 1, 1, 2), x(1, 2, 2, 4), [2] * 3, [1, 1, 2], ints([[[0, 15]]])),
        4,
        ints([[[0, 99]]]),
    ),
    (
        aten.binary_cross_entropy.default,
        (torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])),
        0,
        torch.tensor([0.5, 1.5]),
    ),
    (aten.binary_cross_entropy.default, (torch.tensor([0.5, 1.0]), torch.tensor([1.0, 0.5])), 1, x(2)),
    (aten.bernoulli_.Tensor, (x(2), torch.tensor([0.0, 1.0])), 1, torch.tensor([0.5, nan])),
    (aten.bernoulli_.float, (x(2), 0.5), None, None),
    (aten.bernoulli.out, (torch.tensor([0.0, 1.0]),), 0, torch.tensor([-1.0, 0.0])),
    (aten.poisson.default, (x(3),), 0, torch.tensor([-1.0, 2.0])),
    (aten.multinomial.default, (torch.tensor([[0.0, 1.0]]), 1), 0, torch.tensor([[1.0, math.inf]])),
    (aten.multinomial.default, (torch.tensor([[0.0, 1.0]]), 1), 0, torch.tensor([[1.0, 0.0], [0.0, 0.0]])),
    (aten.max_unpool2d.default, (x(1, 1, 2), ints([[0, 3]]), [2, 2]), 1, ints([[0, 4]])),
    (aten.max_unpool3d.default, (x(1, 1, 1, 2), ints([[[0, 7]]]), [2, 2, 2], [2] * 3, [0] * 3), 1, ints([[[0, -1]]])),
    (aten.masked_scatter_.default, (x(3), torch.tensor([True, False, True]), x(2)), 1, torch.ones(3) > 0),
    (aten.repeat_interleave.Tensor, (ints(0, 2),), 0, ints(-1, 2)),
    (aten._grouped_mm.default, (x(6, 8), x(2, 8, 4), ints(2, 6).int()), 2, ints(2, 7).int()),
    (aten._grouped_mm.default, (x(6, 8), x(2, 8, 4), ints(2, 6).int()), 2, ints(4, 2).int()),
    (aten._grouped_mm.default, (x(2, 3, 8), x(8, 12), ints(0, 12).int()), 2, ints(-1, 12).int()),
    (aten._grouped_mm.default, (x(4, 8), x(8, 4), ints(3, 8).int()), 2, ints(3, 9).int()),
    (aten._grouped_mm.default, (x(2, 3, 8), x(2, 8, 4)), None, None),
    (aten._functional_assert_async.msg, (torch.tensor(True), "no", x(1)), 0, torch.tensor(False)),
]


def run(op, args):
    args = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    kwargs = {"out": torch.empty(2)} if op is aten.bernoulli.out else {}
    do = in_range(op, op)
    do.word.memory = word = torch.zeros((), dtype=torch.int32)
    torch.manual_seed(0)
    found = do(*args, **kwargs)
    torch.manual_seed(0)
    return found, word.item(), kwargs, do.word.why


@pytest.mark.parametrize(("op", "args", "at", "bad"), CASES, ids=lambda v: str(v) if hasattr(v, "_schema") else "")
def test_in_range_bad_operand_is_recorded_and_clamped(op, args, at, bad):
    found, word, kwargs, _ = run(op, args)
    expected = op(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
    assert word == 0
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    if at is not None:
        _, word, _, why = run(op, [bad if k == at else a for k, a in enumerate(args)])
        assert word == 1 and str(why)


def test_in_range_every_allowed_operator_has_a_case():
    tried = {op.overloadpacket.__name__.rstrip("_") for op, *_ in CASES}
    named = {name.split(".")[1] for name in allowed()}
    assert {rule.rstrip("_") for rule in _RULES if rule in named} <= tried


def test_in_range_index_into_empty_tensor_raises():
    do = in_range(aten.gather.default, aten.gather.default)
    do.word.memory = torch.zeros((), dtype=torch.int32)
    with pytest.raises(IndexError, match="index out of range"):
        do(torch.empty(0, 2), 0, torch.zeros(1, 2, dtype=torch.long))
    assert do(torch.empty(0, 2), 0, torch.zeros(0, 2, dtype=torch.long)).shape == (0, 2)


@pytest.fixture
def gpu():
    return Side(gpu_runtime(FakeDriver()))


def lookup():
    """A program that looks up rows of a table, and adds them."""
    t = Tape()
    w, i = t.input(F32, 5, 3), t.input(I64, 4)
    (rows,) = t.extern("aten.index_select.default", w, 0, i, results=[(F32, (4, 3))])
    twice = t.op("add", rows, rows)
    more = t.op("add", twice, rows)
    t.op("add", w, w, into=w)
    program, slots = t.program()
    contents = {slots[w.slot]: x(5, 3), slots[i.slot]: ints(0, 4, 2, 1)}
    return program, contents, slots[i.slot], {slots[s.slot] for s in (rows, twice, more, w)}


def test_gpu_index_out_of_range_fails_its_instruction(gpu):
    program, contents, index, lost = lookup()
    prepared = gpu.ready(program).prepared
    good, outcome, *_ = gpu.run(prepared, contents)
    assert outcome.failed_at is None
    ours, outcome, *_ = gpu.run(prepared, contents | {index: ints(0, 5, 2, 1)})
    at = next(k for k, i in enumerate(program.body) if program.forms[i.form].opcode == "extern")
    assert (outcome.failed_at, outcome.error) == (at, "index out of range in self")
    assert {s for s, b in ours.items() if b.poison} == lost
    again, outcome, *_ = gpu.run(prepared, contents)
    assert outcome.failed_at is None
    same(again, good)


def test_gpu_replayed_index_out_of_range_is_recorded(gpu):
    program, contents, index, _ = lookup()
    prepared = gpu.ready(program).prepared
    buffers, *_ = gpu.run(prepared, contents)
    for k in range(60):
        for slot in [s for s in buffers if s not in contents]:
            del buffers[slot]
        with torch.inference_mode():
            buffers[index].base.copy_(ints(0, 5 if k == 50 else 4, 2, 1))
        before = gpu.runtime.graphs.replayed
        buffers, outcome, *_ = gpu.run(prepared, buffers)
        assert (outcome.failed_at is None) == (k != 50)
        if k == 50:
            assert gpu.runtime.graphs.replayed > before
            buffers, *_ = gpu.run(prepared, contents)


def test_gpu_status_word_is_written_with_and_without_gradients(gpu):
    with torch.inference_mode():
        prepared = gpu.ready(lookup()[0]).prepared
    ((_, word),) = prepared.words
    status = prepared.status
    for mode in (torch.inference_mode(), torch.enable_grad()):
        with mode:
            word.note(torch.tensor(True))
        with torch.inference_mode():
            assert str(status.complaint(status.fetch())[1]) == "index out of range in self"
            assert status.complaint(status.fetch()) is None


def test_gpu_backward_of_losses_and_pooling_does_not_wait_for_the_device(gpu):
    """Their laws look at the values of targets and indices, which a GPU checks itself."""
    t = Tape()
    loss, own, target, weight = t.input(F32), t.input(F32, 3, 4), t.input(I64, 3), t.input(F32)
    t.extern("aten.nll_loss_backward.default", loss, own, target, None, 1, -100, weight, results=[(F32, (3, 4))])
    grad, image, index = t.input(F32, 1, 1, 2), t.input(F32, 1, 2, 4), t.input(I64, 1, 1, 2)
    t.extern(
        "aten.max_pool2d_with_indices_backward.default",
        *(grad, image, (2, 2), (2, 2), (0, 0), (1, 1), False, index),
        results=[(F32, (1, 2, 4))],
    )
    prepared = gpu.ready(t.program()[0]).prepared
    assert not prepared.uncapturable and len(prepared.words) == 2
