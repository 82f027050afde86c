"""What the library does not check itself: arguments on which its kernels would read or write out of bounds, or end the process.

Operators that a script calls check what they are given. Those that only autograd and composites call trust it; a session may call
any of them with anything. Each has a law here, found by calling every operator of the allow-list with arguments that do not go
together. A law about shapes holds for a form once and for all where nothing of its arguments is a param; a law about values
(indices, lengths, pivots) is looked at in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from wooly_wis.program import Form, OperandRef, ParamRef

from wooly_executor.runtime.buffers import TORCH_DTYPE
from wooly_executor.runtime.calls import LibraryCall, constant, function_of
from wooly_executor.runtime.fast_bindings import FAST

aten = torch.ops.aten
#: Arguments of a call, by the names that the operator's schema has for them.
Arguments = Mapping[str, Any]
Check = Callable[[Arguments], None]


@dataclass(frozen=True, slots=True)
class Law:
    """What must hold of an operator's arguments; each part raises RuntimeError where it does not.

    Attributes:
        shapes: about shapes and numbers; the values of tensors are not looked at.
        values: about the values of tensors, once the shapes are right.
    """

    shapes: Check | None = None
    values: Check | None = None


def guarded(call: LibraryCall, form: Form) -> LibraryCall:
    """A call that keeps to its operator's law, or fails before the library sees it.

    Args:
        call: what a form means, on the device where it will run.
        form: whose operands and params it refers to.
    """
    law = _LAWS.get(call.op.overloadpacket.__name__)
    if law is None:
        return call
    shapes = law.shapes
    if shapes is not None:
        try:
            shapes(_arguments(call.op, *_sketch(call, form)))
            shapes = None
        except TypeError:
            pass  # it asks for a param, which only a run has
        except (RuntimeError, IndexError) as e:
            return replace(call, instead=_failing(str(e)))
    if shapes is None and law.values is None:
        return call
    return replace(call, instead=_checking(call, Law(shapes, law.values)))


def looks_at_values(call: LibraryCall) -> bool:
    """Whether a call's law reads tensors in every run: on a GPU the host waits for them."""
    law = _LAWS.get(call.op.overloadpacket.__name__)
    return law is not None and law.values is not None


def _checking(call: LibraryCall, law: Law) -> Callable[..., Any]:
    op, do = call.op, call.instead or FAST.get(str(call.op)) or function_of(call.op)

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = _arguments(op, args, kwargs)
        for check in (law.shapes, law.values):
            if check is not None:
                check(given)
        return do(*args, **kwargs)

    return checked


def _failing(why: str) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(why)

    return fail


def _arguments(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    declared = op._schema.arguments
    given = {a.name: a.default_value if a.has_default_value() else None for a in declared}
    given.update(zip([a.name for a in declared], args, strict=False))
    given.update(kwargs)
    return given


class _Param:
    """A number that only a run has: nothing can be asked of it."""

    def __bool__(self) -> bool:
        raise TypeError("a param has no value yet")

    def __eq__(self, other: object) -> bool:
        raise TypeError("a param has no value yet")

    __hash__ = None  # type: ignore[assignment]


def _sketch(call: LibraryCall, form: Form) -> tuple[list[Any], dict[str, Any]]:
    """A call's arguments without what tensors hold."""

    def value(attr: Any) -> Any:
        if isinstance(attr, OperandRef):
            view = form.operands[attr.index].view
            if view is None:
                raise RuntimeError("an operand without a view where one is needed")
            return torch.empty_strided(view.sizes, view.strides, dtype=TORCH_DTYPE[view.dtype], device="meta")
        if isinstance(attr, ParamRef):
            return _Param()
        if isinstance(attr, (tuple, list)):
            return [value(a) for a in attr]
        return attr if isinstance(attr, (Tensor, torch.device, torch.dtype)) else constant(attr)

    return [value(a) for a in call.args], {k: value(v) for k, v in call.kwargs}


# -- words of laws -------------------------------------------------------------------------------------------------------


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise RuntimeError(why)


def _sized(given: Arguments, name: str, sizes: Sequence[int]) -> None:
    """The argument is a tensor of these sizes."""
    t = given[name]
    _require(isinstance(t, Tensor), f"{name} must be a tensor of shape {list(sizes)}")
    _require(list(t.shape) == list(sizes), f"{name} must have shape {list(sizes)}, it has {list(t.shape)}")


def _counted(given: Arguments, name: str, n: int) -> None:
    """The argument is a tensor of so many elements."""
    t = given[name]
    _require(isinstance(t, Tensor) and t.numel() == n, f"{name} must be a tensor of {n} elements")


def _optional(given: Arguments, names: Sequence[str], n: int) -> None:
    """Each of the arguments has so many elements, where it is given."""
    for name in names:
        if given.get(name) is not None:
            _counted(given, name, n)


def _within(name: str, t: Tensor, low: int, high: int) -> None:
    """All values lie in [low, high)."""
    if t.numel():
        least, most = t.aminmax()
        _require(
            int(least) >= low and int(most) < high,
            f"index out of range: {name} must lie between {low} and {high - 1}, it has {int(least)} to {int(most)}",
        )


def _like(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _forward(op: torch._ops.OpOverload, given: Arguments, **more: Any) -> list[Tensor]:
    """What an operator would return for the arguments that it has in common with these: shapes alone."""
    args = []
    for a in op._schema.arguments:
        value = more[a.name] if a.name in more else given.get(a.name)
        args.append(_like(value) if isinstance(value, Tensor) else value)
    names = [a.name for a in op._schema.arguments]
    at = next((i for i, a in enumerate(op._schema.arguments) if a.kwarg_only), len(names))
    found = op(*args[:at], **dict(zip(names[at:], args[at:], strict=True)))
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _backward(op: torch._ops.OpOverload, **results: int) -> Check:
    """The named arguments have the shapes of `op`'s results."""

    def check(given: Arguments) -> None:
        found = _forward(op, given)
        for name, k in results.items():
            _sized(given, name, found[k].shape)

    return check


def _same_shape(*names: str) -> Check:
    def check(given: Arguments) -> None:
        for name in names[1:]:
            _sized(given, name, given[names[0]].shape)

    return check


def _all_of(*checks: Check) -> Check:
    def check(given: Arguments) -> None:
        for c in checks:
            c(given)

    return check


# -- pooling and sampling ------------------------------------------------------------------------------------------------


def _pooled(dims: int) -> Check:
    """`grad_output` (and `indices`) are of `self` pooled over its last dimensions, to whatever size."""

    def check(given: Arguments) -> None:
        grad, whole = given["grad_output"], given["self"]
        _require(whole.dim() in (dims + 1, dims + 2), f"self must have {dims + 1} or {dims + 2} dimensions")
        _require(grad.dim() == whole.dim(), f"grad_output must have {whole.dim()} dimensions, it has {grad.dim()}")
        _sized(given, "grad_output", [*whole.shape[:-dims], *grad.shape[-dims:]])
        _require(whole.shape[-dims:].numel() > 0 or not grad.numel(), "self must have elements to pool")
        if "indices" in given:
            _sized(given, "indices", grad.shape)

    return check


def _packed_indices(given: Arguments) -> None:
    """The kernel takes the memory of `indices` as it lies."""
    _require(given["indices"].is_contiguous(), "indices must be contiguous")


def _in_window(dims: int) -> Check:
    """Indices of a pooling operator are places in the last dimensions of what was pooled."""
    return lambda given: _within("indices", given["indices"], 0, given["self"].shape[-dims:].numel())


def _fractional(dims: int) -> Check:
    def check(given: Arguments) -> None:
        for name in ("kernel_size", "output_size"):
            _require(len(given[name]) == dims, f"{name} must have {dims} numbers")
        whole = given["self"]
        _require(whole.dim() in (dims + 1, dims + 2), f"self must have {dims + 1} or {dims + 2} dimensions")
        for name in ("grad_output", "indices"):
            _sized(given, name, [*whole.shape[:-dims], *given["output_size"]])

    return check


def _unfolded(given: Arguments) -> None:
    whole = torch.empty(given["input_sizes"], device="meta")
    _sized(given, "grad_in", whole.unfold(given["dim"], given["size"], given["step"]).shape)


def _some_rows(given: Arguments) -> None:
    _require(given["self"].shape[0] > 0, "self must have rows")


# -- normalisation -------------------------------------------------------------------------------------------------------


def _channels(given: Arguments) -> int:
    t = given["input"]
    _require(t.dim() >= 2, f"input must have at least 2 dimensions, it has {t.dim()}")
    return int(t.shape[1])


def _batch_norm(given: Arguments) -> None:
    n = _channels(given)
    _optional(given, ("weight", "bias", "running_mean", "running_var"), n)
    if not given.get("training", True):
        for name in ("running_mean", "running_var"):
            _require(given.get(name) is not None, f"{name} must be given outside of training")


def _batch_norm_backward(given: Arguments) -> None:
    n = _channels(given)
    _sized(given, "grad_out", given["input"].shape)
    _require(given["input"].numel() > 0, "input must have elements")
    _optional(given, ("weight", "running_mean", "running_var"), n)
    training = given["train"] if "train" in given else given["update"]
    saved = ("save_mean", "save_invstd" if "save_invstd" in given else "save_var")
    for name in saved if training else ("running_mean", "running_var"):
        _counted(given, name, n)


def _layer_norm_backward(given: Arguments) -> None:
    out, mean, rstd = _forward(aten.native_layer_norm.default, given, eps=0.0)
    _sized(given, "grad_out", out.shape)
    _counted(given, "mean", mean.numel())
    _counted(given, "rstd", rstd.numel())


def _group_norm_backward(given: Arguments) -> None:
    whole, n, groups = given["input"], given["N"], given["group"]
    _sized(given, "grad_out", whole.shape)
    _require(
        min(n, given["C"], given["HxW"]) >= 0 and n * given["C"] * given["HxW"] == whole.numel(),
        f"N, C and HxW must multiply to the {whole.numel()} elements of input",
    )
    _require(groups > 0 and given["C"] % groups == 0, "group must divide C")
    _optional(given, ("weight",), given["C"])
    for name in ("mean", "rstd"):
        _counted(given, name, n * groups)


def _weight_norm(v: str, *norms: str) -> Check:
    def check(given: Arguments) -> None:
        t, dim = given[v], given["dim"]
        _require(
            t.numel() > 0 and dim in (0, t.dim() - 1), f"{v} must have elements, dim be its first or last dimension"
        )
        for name in norms:
            _counted(given, name, t.shape[dim])

    return check


# -- attention and recurrent layers --------------------------------------------------------------------------------------


def _attention(given: Arguments) -> None:
    query, key, value = [given[n] for n in ("query", "key", "value")]
    for name, t in (("query", query), ("key", key), ("value", value)):
        _require(t.dim() == 4 and t.numel() > 0, f"{name} must have 4 dimensions, and elements")
    batch, heads, _, width = query.shape
    _require(heads % key.shape[1] == 0, f"the {key.shape[1]} heads of key must divide the {heads} of query")
    _sized(given, "key", [batch, key.shape[1], key.shape[2], width])
    _sized(given, "value", key.shape)
    mask = given.get("attn_mask")
    if mask is not None:
        scores = [batch, heads, query.shape[2], key.shape[2]]
        fits = mask.dim() in (2, 4) and all(m in (1, s) for m, s in zip(mask.shape, scores[-mask.dim() :], strict=True))
        _require(fits, f"attn_mask of shape {list(mask.shape)} does not broadcast to {scores}")


def _attention_backward(given: Arguments) -> None:
    _attention(given)
    for name in ("grad_out", "out"):
        _sized(given, name, given["query"].shape)
    _counted(given, "logsumexp", given["query"].shape[:3].numel())


def _heads(name: str) -> Check:
    def check(given: Arguments) -> None:
        _require(given[name] > 0 and given["embed_dim"] % given[name] == 0, f"{name} must divide embed_dim")

    return check


#: Gates of a recurrent layer, by the number that the library has for its mode: LSTM is the one that it takes.
_LSTM, _GATES = 2, 4


def _recurrent(weights: Sequence[str], cell: str) -> Check:
    def check(given: Arguments) -> None:
        t, hidden = given["input"], given["hidden_size"]
        _require(t.dim() == 3 and t.numel() > 0, "input must have 3 dimensions, and elements")
        _require(given["mode"] == _LSTM and hidden > 0, "this operator is of LSTM layers alone")
        _require(not given["batch_sizes"] and not given["batch_first"], "this operator takes no packed sequences")
        _, batch, width = t.shape
        rows = _GATES * hidden
        _sized(given, weights[0], [rows, width])
        _sized(given, weights[1], [rows, hidden])
        for name in weights[2:]:
            _counted(given, name, rows if given["has_biases"] else given[name].numel())
        for name in ("hx_", cell):
            _counted(given, name, batch * hidden)

    return check


def _layers(gates: int) -> Check:
    """A recurrent network: weights of each layer and direction, as its module has them."""

    def check(given: Arguments) -> None:
        packed = "data" in given
        data, states = given["data" if packed else "input"], given["hx"]
        _require(data.dim() == (2 if packed else 3), f"input must have {2 if packed else 3} dimensions")
        _require(not isinstance(states, list) or len(states) == 2, "hx must be a hidden state and a cell state")
        out = states[0] if isinstance(states, list) else states
        cell = states[1] if isinstance(states, list) else states
        for t in (out, cell):
            _require(
                t.dim() == 3 and t.shape[:2] == out.shape[:2], "hx must have 3 dimensions, of the same layers and batch"
            )
        directions = 2 if given["bidirectional"] else 1
        _require(
            given["num_layers"] > 0 and out.shape[0] == given["num_layers"] * directions, "hx must be of all layers"
        )
        if not packed:
            _require(out.shape[1] == data.shape[0 if given["batch_first"] else 1], "hx must be of input's batch")
        hidden, width, rows = cell.shape[2], out.shape[2], gates * cell.shape[2]
        each = [[rows], [rows]] if given["has_biases"] else []
        more = [[width, hidden]] if width != hidden else []
        wanted = []
        for layer in range(given["num_layers"]):
            taken = data.shape[-1] if not layer else width * directions
            wanted += [[rows, taken], [rows, width], *each, *more] * directions
        found = [list(t.shape) for t in given["params"]]
        _require(found == wanted, f"params must have shapes {wanted}, they have {found}")
        if packed:
            sizes = given["batch_sizes"]
            _require(sizes.dim() == 1 and sizes.numel() > 0, "batch_sizes must have 1 dimension, and elements")

    return check


def _batches(given: Arguments) -> None:
    """The batch of a packed sequence shrinks, and its steps are all of the data."""
    if "batch_sizes" in given:
        sizes, states = _lengths(given, "batch_sizes"), given["hx"]
        batch = (states[0] if isinstance(states, list) else states).shape[1]
        falls = all(a >= b for a, b in pairwise(sizes))
        fits = sizes[0] == batch and sizes[-1] > 0 and sum(sizes) == given["data"].shape[0]
        _require(falls and fits, f"batch_sizes must fall from {batch}, and sum to {given['data'].shape[0]}")


def _recurrent_backward(given: Arguments) -> None:
    _recurrent(("weight1", "weight2", "weight3", "weight4"), "cx_tmp")(given)
    length, batch, _ = given["input"].shape
    for name in ("output", "grad_output"):
        if given[name] is not None:
            _sized(given, name, [length, batch, given["hidden_size"]])
    for name in ("hy_", "cy_", "grad_hy", "grad_cy"):
        if given[name] is not None:
            _counted(given, name, batch * given["hidden_size"])
    # How large it is only the library's layer knows: it says so for tensors like these.
    zeros = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in given.items() if isinstance(t, Tensor)}
    weights = [zeros[n] for n in ("weight1", "weight2", "weight3", "weight4")]
    numbers = [given[n] for n in ("mode", "hidden_size", "num_layers", "has_biases", "bidirectional", "batch_first")]
    with torch.inference_mode(False), torch.enable_grad():
        *_, workspace = aten.mkldnn_rnn_layer.default(
            zeros["input"], *weights, zeros["hx_"], zeros["cx_tmp"], given["reverse"], [], *numbers, True
        )
    _counted(given, "workspace", workspace.numel())


# -- losses --------------------------------------------------------------------------------------------------------------


def _reduced(given: Arguments, n: int) -> None:
    """`grad_output` is of a loss: of `n` samples, or of their sum or mean."""
    _counted(given, "grad_output", n if given["reduction"] == 0 else 1)


def _samples(given: Arguments) -> int:
    t = given["self"]
    _require(t.dim() <= 2, f"self must have 2 dimensions at most, it has {t.dim()}")
    return int(t.shape[0]) if t.dim() == 2 else 1


def _class_count(given: Arguments) -> int:
    t = given["self"]
    return int(t.shape[-1]) if t.dim() else 1


def _margin_backward(given: Arguments) -> None:
    n = _samples(given)
    _counted(given, "target", n)
    _optional(given, ("weight",), _class_count(given))
    _reduced(given, n)


def _multilabel_backward(given: Arguments) -> None:
    n = _samples(given)
    for name in ("target", "is_target"):
        _counted(given, name, given["self"].numel())
    _reduced(given, n)


def _nll_backward(given: Arguments) -> None:
    n = _samples(given)
    _counted(given, "target", n)
    _optional(given, ("weight",), _class_count(given))
    _counted(given, "total_weight", 1)
    _reduced(given, n)


def _nll2d_backward(given: Arguments) -> None:
    t = given["self"]
    _require(t.dim() == 4, f"self must have 4 dimensions, it has {t.dim()}")
    _sized(given, "target", [t.shape[0], *t.shape[2:]])
    _optional(given, ("weight",), t.shape[1])
    _counted(given, "total_weight", 1)
    _reduced(given, given["target"].numel())


def _classes(given: Arguments) -> None:
    """Targets are classes, or what is to be ignored."""
    t, target = given["self"], given["target"]
    classes = _class_count(given) if t.dim() <= 2 else int(t.shape[1])
    _within("target", target[target != given["ignore_index"]], 0, classes)


def _labels(given: Arguments) -> None:
    _within("target", given["target"], -1, _class_count(given))


def _one_class_each(given: Arguments) -> None:
    _within("target", given["target"], 0, _class_count(given))


def _lengths(given: Arguments, name: str) -> list[int]:
    value = given[name]
    found: list[int] = value.tolist() if isinstance(value, Tensor) else list(value)
    return found


def _ctc_shapes(given: Arguments) -> None:
    t = given["log_probs"]
    _require(t.dim() == 3, f"log_probs must have 3 dimensions, it has {t.dim()}")
    for name in ("input_lengths", "target_lengths"):
        n = given[name].numel() if isinstance(given[name], Tensor) else len(given[name])
        _require(n == t.shape[1], f"{name} must be of {t.shape[1]} sequences, they are {n}")
    _require(0 <= given["blank"] < t.shape[2], f"blank must be in label range of {t.shape[2]}")
    targets = given["targets"]
    _require(targets.dim() in (1, 2), "targets must have 1 or 2 dimensions")
    _require(targets.dim() == 1 or targets.shape[0] == t.shape[1], f"targets must be of {t.shape[1]} sequences")


def _ctc_values(given: Arguments) -> None:
    t, targets = given["log_probs"], given["targets"]
    inputs, lengths = _lengths(given, "input_lengths"), _lengths(given, "target_lengths")
    _require(all(0 <= n <= t.shape[0] for n in inputs), f"input_lengths must lie between 0 and {t.shape[0]}")
    most = int(targets.shape[-1])
    _require(all(0 <= n <= most for n in lengths), f"target_lengths must lie between 0 and {most}")
    if targets.dim() == 1:
        _require(sum(lengths) <= most, f"target_lengths sum to {sum(lengths)}, of {most} targets")
        used = targets[: sum(lengths)]
    else:
        places = torch.arange(most, device=targets.device)
        used = targets[places < torch.tensor(lengths, device=targets.device)[:, None]]
    _within("targets", used, 0, int(t.shape[2]))


def _ctc_backward_values(given: Arguments) -> None:
    _ctc_values(given)
    length, batch, _ = given["log_probs"].shape
    for name in ("grad", "neg_log_likelihood"):
        _counted(given, name, batch)
    longest = max(_lengths(given, "target_lengths"), default=0)
    _sized(given, "log_alpha", [batch, length, 2 * longest + 1])


# -- bags and segments ---------------------------------------------------------------------------------------------------


def _in_order(name: str, t: Tensor, most: int) -> None:
    """Values begin at 0 or later, do not fall, and end at `most` or earlier."""
    _within(name, t, 0, most + 1)
    _require(t.shape[-1] < 2 or not bool((t[..., 1:] < t[..., :-1]).any()), f"{name} must not fall")


def _bag_shapes(given: Arguments) -> None:
    indices, offsets = given["indices"], given["offsets"]
    for name, t, dims in (("weight", given["weight"], 2), ("indices", indices, 1), ("offsets", offsets, 1)):
        _require(t.dim() == dims, f"{name} must have {dims} dimensions, it has {t.dim()}")
    _require(not given["include_last_offset"] or offsets.numel() > 0, "include_last_offset: there must be an offset")
    _optional(given, ("per_sample_weights",), indices.numel())


def _bag_offsets(given: Arguments) -> None:
    """Bags begin at the first index, in order, and there is one for every index."""
    offsets, n = given["offsets"], given["indices"].numel()
    _in_order("offsets", offsets, n)
    _require(not n or (offsets.numel() > 0 and int(offsets[0]) == 0), "offsets must begin with 0")


def _bag_values(given: Arguments) -> None:
    _bag_offsets(given)
    _within("indices", given["indices"], 0, int(given["weight"].shape[0]))


def _bag_backward_shapes(given: Arguments) -> None:
    grad, indices, bags = given["grad"], given["indices"], given["offset2bag"]
    _require(grad.dim() == 2 and indices.dim() == 1, "grad must have 2 dimensions, indices 1")
    _require(bags.numel() in (0, indices.numel()), f"offset2bag must be of {indices.numel()} indices")
    _require("offsets" in given or bags.numel() == indices.numel(), f"offset2bag must be of {indices.numel()} indices")
    if "weight" in given:
        _require(given["weight"].dim() == 2, "weight must have 2 dimensions")
        _sized(given, "grad", [grad.shape[0], given["weight"].shape[1]])
    _optional(given, ("per_sample_weights",), indices.numel())
    if given["mode"] == 2 and "maximum_indices" in given:
        _sized(given, "maximum_indices", grad.shape)
    if "bag_size" in given:
        _counted(given, "bag_size", grad.shape[0])


def _bag_backward_values(given: Arguments) -> None:
    bags = int(given["grad"].shape[0])
    rows = int(given["weight"].shape[0]) if "weight" in given else given["num_weights"]
    _within("indices", given["indices"], 0, rows)
    _within("offset2bag", given["offset2bag"], 0, bags)
    if "offsets" in given and not given["offset2bag"].numel():
        _bag_offsets(given)
        _require(given["offsets"].numel() <= bags + 1, f"offsets must be of {bags} bags")
    if given["mode"] == 2 and "maximum_indices" in given:
        _within("maximum_indices", given["maximum_indices"], -1, rows)


def _segments(given: Arguments) -> int:
    """How many, where the shapes go together."""
    data, lengths, offsets = given["data"], given["lengths"], given["offsets"]
    _require((lengths is None) is not (offsets is None), "either lengths or offsets must be given")
    axis = given["axis"]
    _require(0 <= axis < data.dim(), f"axis must lie between 0 and {data.dim() - 1}")
    name, t = ("lengths", lengths) if offsets is None else ("offsets", offsets)
    _require(t.dim() == axis + 1, f"{name} must have {axis + 1} dimensions")
    _sized(given, name, [*data.shape[:axis], t.shape[-1]])
    n = int(t.shape[-1]) - (offsets is not None)
    _require(n >= 0, "offsets must have an element")
    return n


def _reduced_segments(given: Arguments) -> None:
    _segments(given)


def _segments_backward(given: Arguments) -> None:
    n, axis, data = _segments(given), given["axis"], given["data"]
    for name in ("grad", "output"):
        _sized(given, name, [*data.shape[:axis], n, *data.shape[axis + 1 :]])


def _segment_values(given: Arguments) -> None:
    most = int(given["data"].shape[given["axis"]])
    if given["offsets"] is not None:
        _in_order("offsets", given["offsets"], most)
        return
    lengths = given["lengths"]
    _within("lengths", lengths, 0, most + 1)
    _require(not lengths.numel() or int(lengths.sum(-1).max()) <= most, f"lengths must sum to {most}")


# -- linear algebra ------------------------------------------------------------------------------------------------------


def _lu_pivots(given: Arguments) -> None:
    """Rows, counted from 1 (LAPACK's getrs, laswp)."""
    name = "pivots" if "pivots" in given else "LU_pivots"
    rows = int(given["LU" if "LU" in given else "LU_data"].shape[-2])
    _within(name, given[name], 1, rows + 1)


def _unpacked(given: Arguments) -> None:
    t = given["LU_data"]
    _require(t.dim() >= 2, "LU_data must have at least 2 dimensions")
    if given["unpack_pivots"]:
        _sized(given, "LU_pivots", [*t.shape[:-2], min(t.shape[-2:])])


def _unpacked_values(given: Arguments) -> None:
    if given["unpack_pivots"]:
        _lu_pivots(given)


def _ldl_shapes(given: Arguments) -> None:
    """The kernel broadcasts all but the pivots."""
    batch = torch.broadcast_shapes(given["LD"].shape[:-2], given["B"].shape[:-2])
    _require(given["pivots"].shape[:-1] == batch, f"pivots must have batch dimensions {list(batch)}")


def _ldl_pivots(given: Arguments) -> None:
    """Rows, counted from 1; two negative ones in a row are a block of 2 by 2 (LAPACK's sytrs, hetrs)."""
    pivots, rows = given["pivots"], int(given["LD"].shape[-1])
    _within("pivots", pivots.abs(), 1, rows + 1)
    _within("pivots", pivots, -rows, rows + 1)  # the least number has no magnitude
    negative = (pivots < 0).cpu()
    second = torch.zeros(negative.shape[:-1], dtype=torch.bool)
    alone = second.clone()
    for k in range(negative.shape[-1]):
        alone |= second & ~negative[..., k]
        second = negative[..., k] & ~second
    _require(not bool((alone | second).any()), "pivots: negative ones must come in pairs")


def _factored(given: Arguments) -> None:
    b = given["self"]
    _require(b.dim() >= 2, "self must have at least 2 dimensions")
    _sized(given, "A", [*b.shape[:-1], b.shape[-2]])


def _finite(given: Arguments) -> None:
    _require(bool(given["self"].isfinite().all()), "input tensor should not contain infs or NaNs")


# -- optimisers and scans ------------------------------------------------------------------------------------------------


def _fused(*states: str) -> Check:
    """Every parameter's gradient and state has its shape."""

    def check(given: Arguments) -> None:
        shapes = [t.shape for t in given["self"]]
        for name in states:
            if name == "max_exp_avg_sqs" and not given["amsgrad"]:
                continue
            if name == "momentum_buffer_list" and not given[name]:
                continue
            _require([t.shape for t in given[name]] == shapes, f"{name} must have the shapes of the parameters")
        for t in given.get("state_steps", ()):
            _require(t.numel() == 1, "state_steps must have one element each")
        _require(len(given.get("state_steps", shapes)) == len(shapes), "state_steps must be of all parameters")

    return check


def _noisy(given: Arguments) -> None:
    _sized(given, "noise", given["self"].shape)
    if given.get("out") is not None:
        _sized(given, "out", given["self"].shape)


def _masked(given: Arguments) -> None:
    t, kind = given["self"], given["mask_type"]
    _require(kind not in (0, 1) or t.dim() >= 2, "self must have at least 2 dimensions")
    _sized(given, "mask", {0: t.shape[-2:], 1: [t.shape[0], t.shape[-1]]}.get(kind, t.shape) if t.dim() else t.shape)


# -- transforms, convolutions, integers ----------------------------------------------------------------------------------


def _fourier(given: Arguments) -> None:
    t, dims = given["self"], given["dim"]
    _require(all(-t.dim() <= d < t.dim() for d in dims), f"dim must lie between {-t.dim()} and {t.dim() - 1}")
    _require(len({d % t.dim() for d in dims}) == len(dims), "dim must not name a dimension twice")
    _require(given["normalization"] in (0, 1, 2), "normalization must be 0, 1 or 2")
    _require(len(dims) > 0 or "forward" in given, "dim must name a dimension")
    n = given.get("last_dim_size")
    if n is not None:
        _require(n > 0 and t.shape[dims[-1]] == n // 2 + 1, f"self must have {n // 2 + 1} elements along the last dim")


def _convolved(given: Arguments) -> None:
    dims = given["input"].dim() - 2
    for name in ("stride", "padding", "dilation", "output_padding"):
        _require(len(given[name]) in (1, dims), f"{name} must have {dims} numbers")
        _require(all(n >= 0 for n in given[name]), f"{name} must not be negative")
    _sized(given, "grad_output", _forward(aten.convolution.default, given, bias=None)[0].shape)


def _has_multiple(given: Arguments) -> None:
    """The least integer has no magnitude, and a division by -1 of it ends the process."""
    for name in ("self", "other"):
        t = given[name]
        if t.numel() and t.dtype is not torch.bool:
            least = torch.iinfo(t.dtype).min
            _require(
                least == 0 or int(t.min()) > least, f"lcm: {name} has {least}, whose magnitude {t.dtype} does not hold"
            )


_LAWS: dict[str, Law] = {
    # pooling and sampling
    "adaptive_max_pool2d_backward": Law(_pooled(2), _in_window(2)),
    "adaptive_max_pool3d_backward": Law(_all_of(_pooled(3), _packed_indices), _in_window(3)),
    "_adaptive_avg_pool2d_backward": Law(_pooled(2)),
    "_adaptive_avg_pool3d_backward": Law(_pooled(3)),
    "adaptive_avg_pool3d_backward": Law(_pooled(3)),
    "avg_pool2d_backward": Law(_backward(aten.avg_pool2d.default, grad_output=0)),
    "avg_pool3d_backward": Law(_backward(aten.avg_pool3d.default, grad_output=0)),
    "max_pool2d_with_indices_backward": Law(
        _backward(aten.max_pool2d_with_indices.default, grad_output=0, indices=1), _in_window(2)
    ),
    "max_pool3d_with_indices_backward": Law(
        _backward(aten.max_pool3d_with_indices.default, grad_output=0, indices=1), _in_window(3)
    ),
    "fractional_max_pool2d_backward": Law(_all_of(_fractional(2), _packed_indices), _in_window(2)),
    "fractional_max_pool3d_backward": Law(_all_of(_fractional(3), _packed_indices), _in_window(3)),
    "grid_sampler_2d_backward": Law(_backward(aten.grid_sampler_2d.default, grad_output=0)),
    "grid_sampler_3d_backward": Law(_backward(aten.grid_sampler_3d.default, grad_output=0)),
    "reflection_pad1d_backward": Law(_backward(aten.reflection_pad1d.default, grad_output=0)),
    "reflection_pad2d_backward": Law(_backward(aten.reflection_pad2d.default, grad_output=0)),
    "reflection_pad3d_backward": Law(_backward(aten.reflection_pad3d.default, grad_output=0)),
    "replication_pad1d_backward": Law(_backward(aten.replication_pad1d.default, grad_output=0)),
    "replication_pad2d_backward": Law(_backward(aten.replication_pad2d.default, grad_output=0)),
    "replication_pad3d_backward": Law(_backward(aten.replication_pad3d.default, grad_output=0)),
    "unfold_backward": Law(_unfolded),
    # softmax and distances
    "_softmax_backward_data": Law(_same_shape("grad_output", "output")),
    "_log_softmax_backward_data": Law(_same_shape("grad_output", "output")),
    "_masked_softmax": Law(_masked),
    "_masked_softmax_backward": Law(_same_shape("grad_output", "output", "mask")),
    "_pdist_backward": Law(_all_of(_backward(aten._pdist_forward.default, grad=0, pdist=0), _some_rows)),
    # normalisation
    "native_batch_norm": Law(_batch_norm),
    "_native_batch_norm_legit": Law(_batch_norm),
    "_batch_norm_with_update": Law(_batch_norm),
    "batch_norm_update_stats": Law(_batch_norm),
    "native_batch_norm_backward": Law(_batch_norm_backward),
    "batch_norm_backward": Law(_batch_norm_backward),
    "native_layer_norm_backward": Law(_layer_norm_backward),
    "native_group_norm_backward": Law(_group_norm_backward),
    "_weight_norm_interface": Law(_weight_norm("v", "g")),
    "_weight_norm_interface_backward": Law(
        _all_of(_weight_norm("saved_v", "saved_g", "saved_norms"), _same_shape("saved_v", "grad_w"))
    ),
    # attention and recurrent layers
    "_scaled_dot_product_flash_attention_for_cpu": Law(_attention),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Law(_attention_backward),
    "_native_multi_head_attention": Law(_heads("num_head")),
    "_transformer_encoder_layer_fwd": Law(_heads("num_heads")),
    "mkldnn_rnn_layer": Law(_recurrent(("weight0", "weight1", "weight2", "weight3"), "cx_")),
    "mkldnn_rnn_layer_backward": Law(_recurrent_backward),
    "lstm": Law(_layers(_GATES), _batches),
    "gru": Law(_layers(3), _batches),
    "rnn_tanh": Law(_layers(1), _batches),
    "rnn_relu": Law(_layers(1), _batches),
    # losses
    "multi_margin_loss_backward": Law(_margin_backward, _one_class_each),
    "multilabel_margin_loss_backward": Law(_multilabel_backward, _labels),
    "nll_loss_backward": Law(_nll_backward, _classes),
    "nll_loss2d_backward": Law(_nll2d_backward, _classes),
    "_ctc_loss": Law(_ctc_shapes, _ctc_values),
    "_ctc_loss_backward": Law(_ctc_shapes, _ctc_backward_values),
    # bags and segments
    "_embedding_bag": Law(_bag_shapes, _bag_values),
    "_embedding_bag_forward_only": Law(_bag_shapes, _bag_values),
    "_embedding_bag_backward": Law(_bag_backward_shapes, _bag_backward_values),
    "_embedding_bag_dense_backward": Law(_bag_backward_shapes, _bag_backward_values),
    "_embedding_bag_per_sample_weights_backward": Law(_bag_backward_shapes, _bag_backward_values),
    "segment_reduce": Law(_reduced_segments, _segment_values),
    "_segment_reduce_backward": Law(_segments_backward, _segment_values),
    # linear algebra
    "_cholesky_solve_helper": Law(_factored),
    "_linalg_eigvals": Law(None, _finite),
    "linalg_lu_solve": Law(None, _lu_pivots),
    "linalg_ldl_solve": Law(_ldl_shapes, _ldl_pivots),
    "lu_unpack": Law(_unpacked, _unpacked_values),
    # optimisers and scans
    "_fused_adam_": Law(_fused("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")),
    "_fused_adamw_": Law(_fused("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")),
    "_fused_sgd_": Law(_fused("grads", "momentum_buffer_list")),
    "_fused_adagrad_": Law(_fused("grads", "state_sums")),
    "_cummax_helper": Law(_same_shape("self", "values", "indices")),
    "_cummin_helper": Law(_same_shape("self", "values", "indices")),
    "rrelu_with_noise": Law(_noisy),
    "rrelu_with_noise_": Law(_noisy),
    # transforms, convolutions, integers
    "_fft_c2c": Law(_fourier),
    "_fft_r2c": Law(_fourier),
    "_fft_c2r": Law(_fourier),
    "convolution_backward": Law(_convolved),
    "lcm": Law(None, _has_multiple),
    "lcm_": Law(None, _has_multiple),
}
