"""Makes lawful calls of all allowed operators: `python lawful.py OUT [--quick]` writes them as a pickle, by operator.

Most calls are recorded while the samples of PyTorch's own operator database run forward and backward. Operators without a sample
borrow the calls of a sibling (an `out=` overload from the functional one, an in-place method from its function), or get calls
made from the schema alone.
"""

import contextlib
import itertools
import os
import pickle
import sys
import warnings

import torch
from call import UnfitError, call_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from wooly_wis.externs import allowed

#: Maximum number of samples per entry of the database and dtype, and of calls that are kept per operator.
SAMPLES, KEPT = 12, 12
DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool)


class Lawful:
    """The calls found so far."""

    def __init__(self):
        self.calls = {}
        self._shapes = {}

    def add(self, name, args, kwargs):
        """Keep a call, unless a similar call is kept."""
        kept = self.calls.setdefault(name, [])
        if len(kept) >= KEPT:
            return
        with contextlib.suppress(UnfitError):
            call = call_of(name, args, kwargs)
            like = repr((call.args, call.kwargs))
            if like not in self._shapes.setdefault(name, set()):
                self._shapes[name].add(like)
                kept.append(call)


class _Listening(TorchDispatchMode):
    def __init__(self, lawful):
        super().__init__()
        self._lawful, self._names = lawful, allowed()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) in self._names:
            self._lawful.add(str(func), args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _entries():
    from torch.testing._internal import common_methods_invocations as database  # this import takes seconds

    lists = (
        database.op_db,
        database.foreach_unary_op_db,
        database.foreach_binary_op_db,
        database.foreach_pointwise_op_db,
        database.foreach_reduce_op_db,
        database.foreach_other_op_db,
    )
    return itertools.chain(*lists)


def listen(lawful):
    """Run the samples of the database, each entry in a child process, because some entries end their process."""
    for op in list(_entries()):
        if not _by_a_child(lawful, lambda op=op: _listen_to(op)):
            print(f"{op.name}: the samples end their process; skipped", flush=True)


def _by_a_child(lawful, find):
    """Run `find()` in a child process, and add the calls that it returns. Returns whether the child ended normally."""
    tells, told = os.pipe()
    child = os.fork()
    if not child:
        os.close(tells)
        with os.fdopen(told, "wb") as answers:
            pickle.dump(find(), answers)
        os._exit(0)
    os.close(told)
    with os.fdopen(tells, "rb") as answers:
        data = answers.read()
    os.waitpid(child, 0)
    found = pickle.loads(data) if data else {}  # noqa: S301  # data of a child process of this one
    for name, calls in found.items():
        kept = lawful.calls.setdefault(name, [])
        kept += calls[: KEPT - len(kept)]
    return bool(data)


def _listen_to(op):
    """Return the calls that the samples of one entry make."""
    lawful = Lawful()
    with _Listening(lawful):
        for dtype in DTYPES:
            if dtype not in op.dtypes:
                continue
            torch.manual_seed(0)
            with contextlib.suppress(Exception):
                grads = dtype.is_floating_point and op.supports_autograd
                extra = {"num_input_tensors": [3]} if op.name.startswith("_foreach_") else {}
                for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grads, **extra), SAMPLES):
                    with contextlib.suppress(Exception):
                        _run(op, sample, grads)
    return lawful.calls


def _run(op, sample, grads):
    if op.inplace_variant is not None:
        with contextlib.suppress(Exception), torch.no_grad():
            own = tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, sample.input)
            op.inplace_variant(own, *sample.args, **sample.kwargs)
    found = op.op(sample.input, *sample.args, **sample.kwargs)
    if grads:
        results = [t for t in tree_flatten(found)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.autograd.backward([t.sum() for t in results])


# -- operators without a sample -----------------------------------------------------------------------------------------


def by_hand_quantised(lawful):
    """Add calls of fake quantisation, and of products of short numbers."""
    add, f = lawful.add, torch.ones
    on, scales, points = torch.ones(1, dtype=torch.int64), f(3), torch.zeros(3, dtype=torch.int32)
    one, point = f(1), points[:1]
    add("aten.fake_quantize_per_tensor_affine_cachemask.default", (f(3, 4), 0.1, 0, 0, 255), {})
    name = "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default"
    add(name, (f(3, 4), one, point, on, 0, 255), {})
    add("aten.fake_quantize_per_channel_affine_cachemask.default", (f(3, 4), scales, points, 0, 0, 255), {})
    add("aten.fake_quantize_per_channel_affine_cachemask.default", (f(2, 3), scales, points, 1, -128, 127), {})
    for many, args in (("channel", (scales, f(3), 0, 0, 255)), ("tensor", (one, f(1), 0, 255))):
        name = f"aten._fake_quantize_learnable_per_{many}_affine"
        add(f"{name}.default", (f(3, 4), *args, 1.0), {})
        add(f"{name}_backward.default", (f(3, 4), f(3, 4), *args, 1.0), {})
    name = "aten._fused_moving_avg_obs_fq_helper.default"
    add(name, (f(3, 4), on, on, f(3), f(3), scales, points, 0.01, -128, 127, 0, True, True), {})
    add(
        name,
        (f(3, 4, 2), on, on, f(4), f(4), f(4), torch.zeros(4, dtype=torch.int32), 0.01, 0, 255, 1, True, False),
        {},
    )
    add(name, (f(3, 4), on, on, f(1), f(1), one, point, 0.01, 0, 255, -1, False, False), {})
    short, tiny = torch.ones(32, 32, dtype=torch.int8), f(32, 32).to(torch.float8_e4m3fn)
    add("aten._int_mm.default", (short, short), {})
    add("aten._int_mm.out", (short, short), {"out": torch.ones(32, 32, dtype=torch.int32)})
    add("aten._scaled_mm.default", (tiny, tiny.t(), f(()), f(()), None, None, torch.bfloat16), {})
    add("aten._scaled_mm.default", (tiny, tiny.t(), f(32, 1), f(1, 32), f(32).bfloat16(), None, torch.bfloat16), {})


def by_hand_unpivoted(lawful):
    """Add LU factorisations without pivoting, which PyTorch's library for CPUs refuses."""
    add = lawful.add
    for size in ((3, 3), (2, 4, 3), (2, 40)):
        t = torch.ones(size).tril() + torch.eye(*size[-2:])
        k, batch = min(size[-2:]), size[:-2]
        add("aten.linalg_lu.default", (t,), {"pivot": False})
        add("aten.linalg_lu_factor_ex.default", (t,), {"pivot": False})
        factors = {"P": t.new_ones(0), "L": torch.ones(*batch, size[-2], k), "U": torch.ones(*batch, k, size[-1])}
        add("aten.linalg_lu.out", (t,), {"pivot": False, **factors})
        pivots, info = torch.ones(*batch, k, dtype=torch.int32), torch.ones(batch, dtype=torch.int32)
        add(
            "aten.linalg_lu_factor_ex.out",
            (t,),
            {"pivot": False, "LU": torch.ones(size), "pivots": pivots, "info": info},
        )


def by_hand(lawful):
    """Add calls of composite operators that travel as one instruction, of layers and of optimisers."""
    add, f = lawful.add, torch.ones
    x, cell = f(5, 2, 3), (f(16, 3), f(16, 4), f(16), f(16))
    gru, rnn = (f(12, 3), f(12, 4), f(12), f(12)), (f(4, 3), f(4, 4), f(4), f(4))
    h, c = f(1, 2, 4), f(1, 2, 4)
    flags = (True, 1, 0.0, False, False)
    add("aten.lstm.input", (x, [h, c], cell, *flags, False), {})
    add("aten.lstm.data", (f(8, 3), torch.tensor([2, 2, 2, 1, 1]), [h, c], cell, *flags), {})
    for name, weights in (("gru", gru), ("rnn_tanh", rnn), ("rnn_relu", rnn)):
        add(f"aten.{name}.input", (x, h, weights, *flags, False), {})
        add(f"aten.{name}.data", (f(8, 3), torch.tensor([2, 2, 2, 1, 1]), h, weights, *flags), {})
        add(f"aten.{name}_cell.default", (f(2, 3), f(2, 4), *weights), {})
    add("aten.lstm_cell.default", (f(2, 3), [f(2, 4), f(2, 4)], *cell), {})
    layer = (False, [], 2, 4, 1, True, False, False)
    for train in (False, True):
        add("aten.mkldnn_rnn_layer.default", (x, *cell, h[0], c[0], *layer, train), {})
    with torch.enable_grad():
        out = torch.ops.aten.mkldnn_rnn_layer.default(x, *cell, h[0], c[0], *layer, True)
    y, hy, cy, workspace = out
    states = (h[0], c[0], y, hy, cy, f(5, 2, 4), f(1, 2, 4), f(1, 2, 4))
    number = (False, 2, 4, 1, True, True, False, [], False)
    add("aten.mkldnn_rnn_layer_backward.default", (x, *cell, *states, *number, workspace), {})
    for lengths in ((4, 4), (4, 2)):  # the shorter lengths leave parts of the saved tensors unwritten
        ctc = (f(4, 2, 5).log_softmax(2), torch.tensor([[1, 2], [3, 4]]), lengths, (2, 1), 0, False)
        add("aten._ctc_loss.default", ctc, {})
    by_hand_quantised(lawful)
    by_hand_unpivoted(lawful)
    add("aten.linear.default", (f(2, 3), f(4, 3), f(4)), {})
    add("aten.rms_norm.default", (f(2, 3), [3], f(3), 1e-5), {})
    add("aten.cross_entropy_loss.default", (f(2, 5), torch.tensor([1, 4]), f(5), 1, -100, 0.0), {})
    q = f(1, 2, 3, 4)
    add("aten._scaled_dot_product_attention_math.default", (q, q, q, None, 0.0, True), {})
    add("aten._scaled_dot_product_attention_math.default", (q, q, q, f(3, 3), 0.0, False, None), {})
    add("aten._fused_sdp_choice.default", (q, q, q, None, 0.0, True), {})
    add("aten._native_multi_head_attention.default", (*[f(1, 2, 4)] * 3, 4, 2, f(12, 4), f(12), f(4, 4), f(4)), {})
    encoder = (
        4,
        2,
        f(12, 4),
        f(12),
        f(4, 4),
        f(4),
        True,
        False,
        1e-5,
        f(4),
        f(4),
        f(4),
        f(4),
        f(8, 4),
        f(8),
        f(4, 8),
        f(4),
    )
    add("aten._transformer_encoder_layer_fwd.default", (f(1, 2, 4), *encoder), {})
    for first in ((f(3, 4),), (torch.eye(4),)):
        add("aten.linalg_lstsq.default", (*first, f(first[0].shape[0], 2)), {})
    add("aten.native_dropout.default", (f(3, 4), 0.5, True), {})
    add("aten.range.step", (0, 5, 1), {})
    add("aten.kaiser_window.beta", (7, True, 12.0), {})
    add("aten._foobar.default", (f(2, 3), True, True), {"arg3": True})
    indices, offsets = torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 3])
    for mode in (0, 1, 2):
        bag = (f(10, 4), indices, offsets, False, mode, False)
        add("aten._embedding_bag.default", bag, {})
        add("aten._embedding_bag_forward_only.default", bag, {})
        _, to, size, most = torch.ops.aten._embedding_bag.default(*bag)
        for weights in (None, f(6)) if not mode else (None,):
            tail = (10, False, mode, weights)
            add(
                "aten._embedding_bag_backward.default",
                (f(2, 4), indices, offsets, to, size, most, 10, False, mode, False, weights),
                {},
            )
            add("aten._embedding_bag_dense_backward.default", (f(2, 4), indices, to, size, most, *tail), {})
    add("aten._embedding_bag_per_sample_weights_backward.default", (f(2, 4), f(10, 4), indices, offsets, to, 0), {})
    for names in (("lengths", torch.tensor([2, 4])), ("offsets", torch.tensor([0, 2, 6]))):
        for how in ("sum", "max", "mean", "prod", "min"):
            out = torch.segment_reduce(f(6, 2), how, axis=0, **dict([names]))
            add("aten.segment_reduce.default", (f(6, 2), how), {names[0]: names[1], "axis": 0})
            add("aten._segment_reduce_backward.default", (out, out, f(6, 2), how), {names[0]: names[1], "axis": 0})
    _optimisers(add, f)


def _optimisers(add, f):
    def lists(n):
        return [[f(3), f(2, 2)] for _ in range(n)]

    steps = [f(()), f(())]
    for ending, lr in (("default", 0.1), ("tensor_lr", f(()))):
        for name in ("_fused_adam_", "_fused_adamw_"):
            for most in (False, True):
                numbers = {
                    "lr": lr,
                    "beta1": 0.9,
                    "beta2": 0.99,
                    "weight_decay": 0.1,
                    "eps": 1e-8,
                    "amsgrad": most,
                    "maximize": False,
                }
                add(f"aten.{name}.{ending}", (*lists(4), lists(1)[0] if most else [], steps), numbers)
        numbers = {
            "weight_decay": 0.1,
            "momentum": 0.9,
            "lr": lr,
            "dampening": 0.0,
            "nesterov": False,
            "maximize": False,
        }
        add(f"aten._fused_sgd_.{ending}", lists(3), numbers | {"is_first_step": False})
        numbers = {"lr": lr, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-8, "maximize": False}
        add(f"aten._fused_adagrad_.{ending}", (*lists(3), steps), numbers)
    add("aten._amp_foreach_non_finite_check_and_unscale_.default", (lists(1)[0], f(()), f(())), {})
    add("aten._amp_update_scale_.default", (f(()), torch.zeros((), dtype=torch.int32), f(()), 2.0, 0.5, 2000), {})


def _tensors_of(call):
    """Return the arguments of a call by name, with real tensors."""
    stores = [torch.frombuffer(bytearray(m.raw), dtype=torch.uint8) if m.raw else torch.empty(0, dtype=torch.uint8)
              for m in call.memories]  # fmt: skip

    def value(v):
        if hasattr(v, "memory"):
            return torch.empty(0, dtype=v.dtype).set_(stores[v.memory].untyped_storage(), v.offset, v.sizes, v.strides)
        return [value(x) for x in v] if isinstance(v, tuple) else v

    return {a.name: value(v) for a, v in call.named()}


def _overload(name):
    _, packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def borrow(lawful, name):
    """Make calls of an operator from those of its siblings: the same arguments by name, and their results as `out=`."""
    op = _overload(name)
    bare = op.overloadpacket.__name__
    for sibling in (bare, bare.removesuffix("_"), f"{bare}_"):
        packet = getattr(torch.ops.aten, sibling, None)
        for kind in packet.overloads() if packet is not None else ():
            for call in lawful.calls.get(f"aten.{sibling}.{kind}", ()):
                with contextlib.suppress(Exception):
                    _borrow(lawful, name, op, call)
    return {name: lawful.calls.get(name, [])}


def _borrow(lawful, name, op, call):
    known = _tensors_of(call)
    made = None
    given = {}
    outs = iter(())
    for a in op._schema.arguments:
        if a.is_out:
            if made is None:
                functional_op = call.operator
                keep = {x.name for x in functional_op._schema.arguments}
                made = functional_op(**{k: v for k, v in known.items() if k in keep})
                flat = [made] if isinstance(made, torch.Tensor) else list(made)
                outs = iter([flat] if "[]" in str(a.type) or "List" in str(a.type) else flat)
            given[a.name] = next(outs)
        elif a.name in known:
            given[a.name] = known[a.name]
        elif not a.has_default_value():
            return
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only]
    while positional and positional[-1] not in given:
        positional.pop()
    if any(n not in given for n in positional):
        return
    kwargs = {k: v for k, v in given.items() if k not in positional}
    op(*[_copied(given[n]) for n in positional], **{k: _copied(v) for k, v in kwargs.items()})
    lawful.add(name, [given[n] for n in positional], kwargs)


def _copied(v):
    if isinstance(v, torch.Tensor):
        return v.clone()
    return [_copied(x) for x in v] if isinstance(v, list) else v


#: Guesses for arguments by type, if nothing else is known.
_GUESSES = {
    "Tensor": (torch.ones(2, 3), torch.eye(3), torch.ones(1, 2, 4, 4), torch.tensor([[1, 0, 1]]), torch.ones(3)),
    "int": (1, 0, 2),
    "float": (0.5,),
    "bool": (False, True),
    "number": (1, 0.5),
    "str": ("sum", "mean", "none"),
}


def guess(lawful, name):
    """Make calls from the schema alone, with a few likely values. They may be unlawful, so they are not tried here."""
    op = _overload(name)
    needed = [a for a in op._schema.arguments if not a.has_default_value()]
    for k in range(5):
        values = [_guessed(str(a.type), k) for a in needed]
        kwargs = {a.name: v for a, v in zip(needed, values, strict=True) if a.kwarg_only}
        lawful.add(name, [v for a, v in zip(needed, values, strict=True) if not a.kwarg_only], kwargs)


def _guessed(kind, k):
    if kind.startswith("Optional"):
        return None
    inner = kind.removeprefix("List[").removesuffix("]")
    choices = _GUESSES.get(inner, (None,))
    value = choices[k % len(choices)]
    return [_copied(value), _copied(value)] if kind.startswith("List[") else _copied(value)


def gather(*, database=True):
    """Return lawful calls by operator, and the operators without any. `database`: with calls from the samples."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lawful = Lawful()
    if database:
        listen(lawful)
    by_hand(lawful)
    for _ in range(2):  # twice, because some siblings borrow from siblings
        for name in sorted(allowed()):
            if not lawful.calls.get(name):  # borrowed calls are not tried here: a wrong one may end the process
                _by_a_child(lawful, lambda name=name: borrow(lawful, name))
    for name in sorted(allowed()):
        if not lawful.calls.get(name):
            guess(lawful, name)
    calls = {name: found for name, found in sorted(lawful.calls.items()) if found}
    return calls, sorted(allowed() - calls.keys())


if __name__ == "__main__":
    found, lacking = gather(database="--quick" not in sys.argv)
    with open(sys.argv[1], "wb") as f:
        pickle.dump(found, f)
    print(
        f"{sum(map(len, found.values()))} calls of {len(found)} operators; none of {len(lacking)}: {' '.join(lacking)}"
    )
