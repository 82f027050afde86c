"""What to do for one call signature: infer once, then replay from the cache.

A *signature* is an operator with everything about its arguments but the buffers and the liftable scalars. The first call with
a signature is inferred on meta tensors (which also raises PyTorch's own errors at the call), turned into a WIS form and kept
as a `Plan`; later calls only fill in buffers and params.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from wooly_wis.dtypes import DType
from wooly_wis.externs import is_allowed
from wooly_wis.program import Attr, Form, Operand, OperandRef, ParamKind, ParamRef, Role, Symbol, View

from wooly import storage
from wooly.devices import mixed_devices
from wooly.kernels.opcodes import native_form
from wooly.recorder import Forms, Recorder
from wooly.storage import Layout, dense_strides
from wooly.torch_private import raw_device, suggested_format

DTYPES: dict[torch.dtype, DType] = {
    torch.bool: DType.BOOL,
    torch.uint8: DType.U8,
    torch.int8: DType.I8,
    torch.int16: DType.I16,
    torch.int32: DType.I32,
    torch.int64: DType.I64,
    torch.uint16: DType.U16,
    torch.uint32: DType.U32,
    torch.uint64: DType.U64,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float32: DType.F32,
    torch.float64: DType.F64,
    torch.complex32: DType.C32,
    torch.complex64: DType.C64,
    torch.complex128: DType.C128,
    torch.float8_e4m3fn: DType.F8E4M3FN,
    torch.float8_e5m2: DType.F8E5M2,
    torch.float8_e4m3fnuz: DType.F8E4M3FNUZ,
    torch.float8_e5m2fnuz: DType.F8E5M2FNUZ,
    torch.float8_e8m0fnu: DType.F8E8M0FNU,
}
TORCH_DTYPES: dict[DType, torch.dtype] = {v: k for k, v in DTYPES.items()}

#: Functions of two tensors, element by element, whose meta kernels are Python's and take the layout from another operand than
#: ATen's iterator does.
_ITERATED = frozenset(
    f"aten.{name}_backward.default" for name in ("elu", "hardsigmoid", "hardswish", "hardtanh", "logit", "softplus")
)
#: Operators whose meta kernel says another shape than the CPU's (oneDNN's workspace, unused statistics) or another layout
#: (LAPACK's columns, MKL's choice of axes): inferred on the host.
_INFERRED_ON_HOST = frozenset(
    {
        "aten.mkldnn_rnn_layer.default",
        "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten._batch_norm_with_update.default",
        "aten._histogramdd_bin_edges.default",
        "aten._histogramdd_from_bin_cts.default",
        "aten._embedding_bag.default",
        "aten._embedding_bag_forward_only.default",
        "aten._linalg_svd.default",
        "aten.linalg_eig.default",
        "aten._fft_r2c.default",
        "aten._fft_c2r.default",
        "aten.max_unpool2d.default",
        "aten.native_batch_norm.out",
        "aten._native_batch_norm_legit.out",
        "aten.batch_norm_update_stats.default",
        "aten.multilabel_margin_loss_forward.default",
    }
)

#: Arguments that operators write though their schemas do not say so.
_WRITES_UNSAID = {
    "aten.batch_norm_update_stats.default": ("running_mean", "running_var"),
    "aten.mkldnn_rnn_layer_backward.default": ("workspace",),
}

#: Arguments of `out=` that LAPACK's kernels lay out by columns: whenever they give them a size, only to empty ones, or where
#: they solve from the left.
_COLUMN_MAJOR = {
    ("aten.linalg_ldl_factor_ex.out", "LD"): "always",
    ("aten.linalg_ldl_solve.out", "out"): "always",
    ("aten.linalg_lu_factor_ex.out", "LU"): "always",
    ("aten.linalg_lu_solve.out", "out"): "from the left",
    ("aten.linalg_qr.out", "Q"): "always",
    ("aten.linalg_qr.out", "R"): "always",
    ("aten._linalg_eigh.eigenvalues", "eigenvectors"): "always",
    ("aten.cholesky_inverse.out", "out"): "empty",
    ("aten.linalg_eig.out", "eigenvectors"): "empty",
    ("aten.linalg_householder_product.out", "out"): "empty",
    ("aten.ormqr.out", "out"): "empty",
    ("aten.triangular_solve.X", "M"): "always",
    ("aten.triangular_solve.X", "X"): "always",
}

#: Operators whose CPU kernels word the warning of a resized `out=`, or lay it out, in a way that meta kernels do not know.
RESIZED_ON_HOST = frozenset(
    {"aten._fft_c2c.out", "aten._fft_r2c.out", "aten.cat.out", "aten.conj_physical.out", "aten.kthvalue.values"}
)

#: Elements up to which a failing call is made again on the host for its error.
_STAND_IN_LIMIT = 1 << 24

#: Elements up to which a call of a new signature is tried on host tensors of its own sizes; of a new kind, up to the second.
_TRIAL_LIMIT = 1 << 12
_TRIAL_LIMIT_NEW = 1 << 16

#: Operators whose kernels run out of bounds on zeros (lengths, labels, paths; pivots, which LAPACK numbers from 1) instead of
#: refusing them: the device is asked.
_NEVER_TRIED = frozenset({"_ctc_loss", "_ctc_loss_backward", "linalg_ldl_solve", "linalg_lu_solve"})

#: What kernels say of dtypes that they do not take, whatever the values are.
_ABOUT_DTYPES = re.compile(
    r"(?i)not implemented for|not supported for|dtype|can't be cast|scalar type|does not support \w+ input"
)

#: Beside the elementwise operators, those that take shrunk arguments as well as whole ones.
_SHRINKABLE = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "addr", "mv", "dot", "vdot", "ger", "matmul"}
)

#: Operators whose CPU kernels resize `out=` without the warning that their meta kernels give.
RESIZE_SILENTLY = frozenset(
    {
        "addbmm",
        "arange",
        "bernoulli",
        "eye",
        "linspace",
        "log_sigmoid_forward",
        "logspace",
        "multinomial",
        "narrow_copy",
    }
)

#: Scalars of these decide the output's size, so they stay in the signature.
_SHAPED_BY_SCALARS = frozenset({"arange", "range", "linspace", "logspace"})


class Inferences:
    """How often calls were inferred rather than looked up. No device data is in any of them.

    Attributes:
        on_meta: on meta tensors, that is without memory.
        on_host: on host tensors of zeros, for operators whose meta kernel is missing or says something else.
        trials: on host tensors of zeros, for the errors that only a kernel knows of.
    """

    __slots__ = ("on_host", "on_meta", "trials")

    def __init__(self) -> None:
        self.on_meta = self.on_host = self.trials = 0


def host_tensor_at(op: torch._ops.OpOverload) -> int | None:
    """Where, among its positional arguments, an operator takes the lengths of packed sequences, a tensor of the host."""
    arguments = enumerate(op._schema.arguments)
    return next((i for i, a in arguments if a.name == "batch_sizes" and str(a.type) == "Tensor"), None)


class OpFacts:
    """What the schema of one operator overload says, looked up once.

    Attributes:
        op: the overload.
        name: ``aten.add.Tensor``.
        wants_tensor: per positional argument, whether the schema wants a tensor there.
        scalar: per positional argument, whether it is a number that may be bound per run.
        scalar_kw: names of keyword-only arguments of that kind.
        written: names of the arguments that the operator writes.
        returns_written: for a mutable operator, per return the name of the argument that it is (None: a fresh tensor).
        dynamic: the output's shape depends on data.
        each_alone: the operator does the same to each tensor of a list, which may be on several devices.
        random: the operator draws random numbers.
        host_at: which positional argument is a tensor of the host: lengths that the operator looks at, constants of the form.
        generator: where, among the positional arguments or behind them, it takes a generator; None: it takes none.
    """

    __slots__ = (
        "_dropout",
        "dynamic",
        "each_alone",
        "generator",
        "host_at",
        "list_return",
        "mutable",
        "n_returns",
        "name",
        "op",
        "out_args",
        "positions",
        "random",
        "returns_written",
        "scalar",
        "scalar_kw",
        "wants_tensor",
        "written",
    )

    def __init__(self, op: torch._ops.OpOverload) -> None:
        schema = op._schema
        self.op = op
        self.name = str(op)
        lift = op.overloadpacket.__name__ not in _SHAPED_BY_SCALARS
        positional = [a for a in schema.arguments if not a.kwarg_only]
        self.host_at = host_tensor_at(op)
        self.scalar = tuple([lift and _is_number(a) and i != self.host_at for i, a in enumerate(positional)])
        self.wants_tensor = tuple(["Tensor" in str(a.type) for a in positional])
        self.scalar_kw = frozenset(a.name for a in schema.arguments if a.kwarg_only and lift and _is_number(a))
        self.positions = {a.name: i for i, a in enumerate(positional)}
        said = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        self.written = said + _WRITES_UNSAID.get(self.name, ())
        self.out_args = tuple(a.name for a in schema.arguments if a.is_out)
        self.mutable = bool(self.written)
        self.n_returns = len(schema.returns)
        self.list_return = self.n_returns == 1 and str(schema.returns[0].type) == "List[Tensor]"
        owner = {frozenset(a.alias_info.before_set): a.name for a in schema.arguments if a.alias_info is not None}
        self.returns_written = tuple(
            owner.get(frozenset(r.alias_info.before_set)) if r.alias_info is not None else None for r in schema.returns
        )
        self.each_alone = op.overloadpacket.__name__.startswith("_foreach_")
        tags = op.tags
        self.dynamic = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        self.random = torch.Tag.nondeterministic_seeded in tags
        self.generator = next((i for i, a in enumerate(schema.arguments) if "Generator" in str(a.type)), None)
        self._dropout = next((i for i, a in enumerate(positional) if a.name == "dropout_p"), None)

    def draws(self, call: Call) -> bool:
        """Whether this call draws random numbers: attention without dropout does not."""
        i = self._dropout
        return self.random and (i is None or (i < len(call.args) and call.args[i] != 0))


def _is_number(argument: Any) -> bool:
    # A Python number given where a tensor is expected arrives as a number, too.
    return str(argument.type) in ("number", "Optional[number]", "List[number]", "Tensor", "Optional[Tensor]")


class Plan(NamedTuple):
    """How to replay one signature.

    Attributes:
        recorder: that of the device.
        form: interned instruction.
        outs: (layout, interned alloc) per fresh output; None where the operator returns an undefined tensor.
        written: positions, among the call's operands, of those that it writes.
        random: whether two more params (seed, offset) follow.
        dynamic: the far side says what came out.
    """

    recorder: Recorder
    form: int
    outs: tuple[tuple[Layout, int] | None, ...]
    written: tuple[int, ...]
    random: bool
    dynamic: bool


class Call(NamedTuple):
    """One call's arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _NoMetaKernelError(Exception):
    """Internal signal: the result cannot be inferred from the arguments' kind."""


class ResizeOutError(Exception):
    """Internal signal: an `out=` tensor must take another size before the call can be planned."""

    def __init__(self, sizes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        super().__init__("out tensors need another size")
        self.sizes = sizes


def _unsupported(name: str, why: str) -> NotImplementedError:
    return NotImplementedError(f"{name} is not supported on the wooly device: {why}; compute it on the CPU, x.cpu()")


class _Doubts(threading.local):
    last: Exception | None = None


class PlanBuilder:
    """Builds plans out of shared forms."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self.inferences = Inferences()
        #: Operators with the dtypes that were tried: see `_try`.
        self._tried: set[tuple[Any, ...]] = set()
        self._doubts = _Doubts()

    @property
    def doubt(self) -> Exception | None:
        """The error of this thread's last call's trial, if the device may see it otherwise."""
        return self._doubts.last

    @doubt.setter
    def doubt(self, error: Exception | None) -> None:
        self._doubts.last = error

    def build(self, facts: OpFacts, call: Call, recorder: Recorder) -> Plan:
        """The plan for a call on the device of `recorder`.

        Raises:
            NotImplementedError: the operator is not in the allow-list, or its result cannot be described.
            ResizeOutError: an `out=` argument has to be resized first.
        """
        if not is_allowed(facts.name):
            raise _unsupported(facts.name, "the executor's library does not offer it")
        check = _CHECKS.get(facts.op.overloadpacket.__name__)
        if check is not None:
            check(call)
        dynamic = (facts.dynamic and not facts.out_args) or _has_mask_index(facts, call)
        fresh: list[Tensor | None] = []
        if not dynamic:
            try:
                fresh = self._infer(facts, call)
            except _NoMetaKernelError:
                if facts.out_args:
                    fresh = self._infer(facts, call, on_host=True)
                else:
                    # The far side has to tell the shape. A mutable operator changes no shape of its own.
                    dynamic = not facts.mutable
        self.doubt = None
        self._try(facts, call, recorder)
        _refuse_overlap(facts, call)
        form, written = self._form(facts, call, fresh, dynamic)
        outs: list[tuple[Layout, int] | None] = []
        for t in fresh:
            if t is None:
                outs.append(None)
                continue
            layout = Layout(t.dtype, tuple(t.shape), t.stride())
            outs.append((layout, self._forms.alloc(layout.nbytes)))
        return Plan(recorder, self._forms.intern(form), tuple(outs), written, facts.draws(call), dynamic)

    def differentiated(
        self,
        facts: OpFacts,
        call: Call,
        recorder: Recorder,
        places: tuple[int, ...],
        wanted: tuple[int, ...],
        grads: tuple[Tensor | None, ...] | None,
    ) -> Plan:
        """The plan for a call where gradients are wanted.

        Args:
            facts: the operator.
            call: its arguments.
            recorder: that of the device.
            places: for each of its tensors, which of the different ones it is.
            wanted: which of the different tensors want a gradient.
            grads: gradients of its results, from which theirs are asked for; None: the results are.
        """
        form, _ = self._form(facts, call, [], dynamic=False)
        if form.opcode != "extern":
            raise _unsupported(facts.name, "its gradients are not recorded whole")
        operands = [form.operands[places.index(k)] for k in range(max(places) + 1)]

        def placed(value: Attr) -> Attr:
            if isinstance(value, OperandRef):
                return OperandRef(places[value.index])
            return tuple([placed(v) for v in value]) if isinstance(value, tuple) else value

        attrs: dict[str, Attr] = {k: placed(v) for k, v in form.attrs}
        attrs["wanted"] = tuple([OperandRef(k) for k in wanted])
        found = self._infer_wanting(facts, call, places, wanted, grads)
        layouts = [Layout(t.dtype, tuple(t.shape), t.stride()) for t in found]
        if grads is not None:
            refs: list[Attr] = []
            for g in grads:
                refs.append(None if g is None else OperandRef(len(operands)))
                if g is not None:
                    operands.append(Operand(Role.IN, view_of(g)))
            attrs["vjp"] = tuple(refs)
        operands += [Operand(Role.OUT, View(DTYPES[x.dtype], x.sizes, x.strides, 0)) for x in layouts]
        whole = Form("extern", tuple(operands), form.params, tuple(sorted(attrs.items())))
        outs = tuple([(x, self._forms.alloc(x.nbytes)) for x in layouts])
        return Plan(recorder, self._forms.intern(whole), outs, (), facts.draws(call), dynamic=False)

    def _infer_wanting(
        self,
        facts: OpFacts,
        call: Call,
        places: tuple[int, ...],
        wanted: tuple[int, ...],
        grads: tuple[Tensor | None, ...] | None,
    ) -> list[Tensor]:
        """Results, or gradients, as meta tensors: composites lay them out by what wants a gradient."""
        place = iter(places)
        distinct: dict[int, Tensor] = {}

        def to_meta(a: Any) -> Any:
            if isinstance(a, Tensor) and raw_device(a).type == "wooly":
                k = next(place)
                if k not in distinct:
                    m = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta")
                    distinct[k] = m.requires_grad_(k in wanted)
                return distinct[k]
            return [to_meta(x) for x in a] if isinstance(a, (list, tuple)) else a

        with torch.enable_grad():
            result = _call(
                facts, [to_meta(a) for a in call.args], {k: to_meta(v) for k, v in call.kwargs.items()}, "meta"
            )
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        if grads is None:
            return results
        given = [
            (t, torch.empty_strided(g.shape, g.stride(), dtype=g.dtype, device="meta"))
            for t, g in zip(results, grads, strict=True)
            if g is not None
        ]
        leaves = [distinct[k] for k in wanted]
        found = torch.autograd.grad([t for t, _ in given], leaves, [g for _, g in given], allow_unused=True)
        # Where nothing flows the executor gives zeros like the operand.
        return [
            leaf.detach().as_strided(leaf.shape, dense_strides(tuple(leaf.shape), leaf.stride())) if g is None else g
            for leaf, g in zip(leaves, found, strict=True)
        ]

    def _infer(self, facts: OpFacts, call: Call, *, on_host: bool = False) -> list[Tensor | None]:
        """Fresh outputs as meta tensors, in order.

        Raises:
            _NoMetaKernelError: there is no way to know without the values.
        """
        on_host = on_host or facts.name in _INFERRED_ON_HOST or _is_conv3d_channels_last(facts, call)
        where = "cpu" if on_host else "meta"
        if on_host:
            self.inferences.on_host += 1
        else:
            self.inferences.on_meta += 1

        def to_meta(a: Any) -> Any:
            if isinstance(a, Tensor):
                if raw_device(a).type != "wooly":
                    return a
                m = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=where)
                return _seen_as(a, m if where == "meta" else m.zero_())
            if isinstance(a, (list, tuple)):
                return [to_meta(x) for x in a]
            if isinstance(a, torch.device):
                return torch.device(where)
            return a

        args = [to_meta(a) for a in call.args]
        kwargs = {k: to_meta(v) for k, v in call.kwargs.items()}
        try:
            ask_host = facts.name in RESIZED_ON_HOST and not on_host
            if facts.out_args and (ask_host or facts.op.overloadpacket.__name__ in RESIZE_SILENTLY):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    result = _call(facts, args, kwargs, where)
            else:
                result = _call(facts, args, kwargs, where)
        except NotImplementedError as e:
            if where == "cpu":
                raise
            raise _NoMetaKernelError from e
        except Exception:
            # Meta kernels word many errors in their own way, and some refuse what the CPU takes.
            if where == "cpu" or sum([t.numel() for t in tensors_of(call)]) > _STAND_IN_LIMIT:
                raise
            return self._infer(facts, call, on_host=True)
        if facts.out_args:
            try:
                self._check_out(facts, call, kwargs)
            except ResizeOutError:
                if ask_host and sum([t.numel() for t in tensors_of(call)]) <= _STAND_IN_LIMIT:
                    return self._infer(facts, call, on_host=True)
                raise
        if facts.mutable and all(name is not None for name in facts.returns_written):
            return []
        flat = list(result) if isinstance(result, (list, tuple)) else [result]
        fresh = []
        names = facts.returns_written if len(flat) == facts.n_returns else (None,) * len(flat)
        for t, name in zip(flat, names, strict=True):
            if name is not None:
                continue
            if t is not None and not isinstance(t, Tensor):
                raise _NoMetaKernelError
            fresh.append(t)
        if facts.name == "aten.convolution.default" and where == "meta" and fresh[0] is not None:
            fresh[0] = fresh[0].contiguous(memory_format=_convolution_format(call))
        if facts.name == "aten.nonzero_static.default" and fresh[0] is not None:
            fresh[0] = fresh[0].contiguous()
        if where == "meta" and torch.Tag.pointwise in facts.op.tags:
            halves = [t for t in tensors_of(call) if t.dtype in _WIDENED]
            if any(overlaps(t) for t in halves):  # meta kernels widen these first, and lay out what is expanded anew
                wide = _call(facts, tree_map(_wide, args), tree_map(_wide, kwargs), where)
                for t, w in zip(fresh, tree_leaves(wide), strict=False):
                    if t is not None and t.shape == w.shape:
                        t.as_strided_(w.shape, w.stride())
        if facts.name in _ITERATED and where == "meta" and fresh[0] is not None:
            iterated = torch.add(*[a for a in args if isinstance(a, Tensor)])
            fresh[0] = torch.empty_strided(iterated.shape, iterated.stride(), dtype=fresh[0].dtype, device=where)
        if facts.name in _NORMS:
            fresh[1:] = [t if t is None else t.to(_statistics_dtype(call)) for t in fresh[1:]]
        return fresh

    def _try(self, facts: OpFacts, call: Call, recorder: Recorder) -> None:
        """Find errors that meta kernels do not: of dtypes that a kernel does not take, of arguments that only it looks at.

        The call is made on host tensors of zeros: each small one, and of larger ones the first of every combination of operator
        and dtypes. An error about dtypes is raised. Any other may be the zeros' fault: it is kept in `doubt`, and the device is
        asked at once. The executor's library is this one; of any other, only the device knows.
        """
        link = recorder.link
        if link is None or link.device.get("vendor") != "cpu" or facts.name in _INFERRED_ON_HOST:
            return
        if facts.op.overloadpacket.__name__ in _NEVER_TRIED:
            self.doubt = RuntimeError("not tried on the host")
            return
        found = tensors_of(call)
        kind = (facts.op, *[t.dtype for t in found], *[a.__class__ for a in call.args], *call.kwargs)
        known = kind in self._tried
        elements = sum([t.numel() for t in found])
        limit = None
        if elements > (_TRIAL_LIMIT if known else _TRIAL_LIMIT_NEW):
            if known or not (torch.Tag.pointwise in facts.op.tags or facts.op.overloadpacket.__name__ in _SHRINKABLE):
                return
            limit = 2
        args = [stand_in(a, limit) for a in call.args]
        kwargs = {k: stand_in(v, limit) for k, v in call.kwargs.items()}
        self.inferences.trials += 1
        state = torch.get_rng_state() if facts.random else None
        try:
            _call(facts, args, kwargs, "cpu")
        except Exception as e:
            if _ABOUT_DTYPES.search(str(e)):
                raise
            if limit is None:
                self.doubt = e
        else:
            if elements:
                self._tried.add(kind)
        finally:
            if state is not None:
                torch.set_rng_state(state)

    def _check_out(self, facts: OpFacts, call: Call, metas: dict[str, Any]) -> None:
        wrong = {}
        for name in facts.out_args:
            real, meta = call.kwargs.get(name), metas.get(name)
            pairs = zip(real, meta, strict=True) if isinstance(real, (list, tuple)) else [(real, meta)]
            for r, m in pairs:
                if isinstance(r, Tensor) and (tuple(r.shape) != tuple(m.shape)):
                    if isinstance(real, (list, tuple)):
                        raise _unsupported(facts.name, "a list of `out` tensors with other sizes; allocate them first")
                    if facts.op.overloadpacket.__name__ in _SHAPED_BY_SCALARS and r.numel() == m.numel():
                        continue  # these fill whatever holds as many
                    if facts.op.overloadpacket.__name__ == "arange" and r.numel():
                        warnings.warn(
                            f"The number of elements in the out tensor of shape {list(r.shape)} is {r.numel()} which does not "
                            f"match the computed number of elements {m.numel()}. Note that this may occur as a result of "
                            f"rounding error. The out tensor will be resized to a tensor of shape ({m.numel()},).",
                            stacklevel=2,
                        )
                    refuse_overlap(r)
                    when = _COLUMN_MAJOR.get((facts.name, name))
                    by_columns = when == "always" or (when == "empty" and r.numel() == 0)
                    by_columns |= when == "from the left" and call.kwargs.get("left", True)
                    wrong[name] = (tuple(m.shape), column_major(tuple(m.shape)) if by_columns else m.stride())
        if wrong:
            raise ResizeOutError(wrong)

    def _form(
        self, facts: OpFacts, call: Call, fresh: list[Tensor | None], dynamic: bool
    ) -> tuple[Form, tuple[int, ...]]:
        operands: list[Operand] = []
        params: list[ParamKind] = []
        scalars: list[Attr] = []
        written: list[int] = []
        seen: dict[str, list[Attr]] = {"conj": [], "neg": []}
        names = list(facts.positions)

        def attr(a: Any, name: str, lift: bool) -> Attr:
            if isinstance(a, Tensor):
                if raw_device(a).type == "wooly":
                    role = Role.INOUT if name in facts.written else Role.IN
                    if role is Role.INOUT:
                        written.append(len(operands))
                        if facts.name in _FILLS:
                            a = once(a)
                    operands.append(Operand(role, view_of(a)))
                    ref = OperandRef(len(operands) - 1)
                    seen["conj"] += [ref] * a.is_conj()
                    seen["neg"] += [ref] * a.is_neg()
                    return ref
                value, dtype = number_of(a)
                param = ParamRef(len(params))
                params.append(kind_of(value))
                if dtype is not None:
                    scalars.append((param, dtype))
                return param
            if lift and isinstance(a, (bool, int, float, complex)):
                params.append(kind_of(a))
                return ParamRef(len(params) - 1)
            if isinstance(a, (list, tuple)):
                return tuple([attr(x, name, lift) for x in a])
            return constant(a)

        args = tuple([attr(a, names[i], facts.scalar[i]) for i, a in enumerate(call.args)])
        kwargs = tuple([(k, attr(v, k, k in facts.scalar_kw)) for k, v in call.kwargs.items()])
        attrs: dict[str, Attr] = {"name": facts.name, "args": args, "kwargs": kwargs}
        random = facts.draws(call)
        if random:
            attrs["rng"] = (ParamRef(len(params)), ParamRef(len(params) + 1))
            params += [ParamKind.I64, ParamKind.I64]
        if scalars:
            attrs["scalars"] = tuple(scalars)
        attrs |= {k: tuple(refs) for k, refs in seen.items() if refs}
        for t in fresh:
            if t is not None:
                operands.append(Operand(Role.OUT, View(DTYPES[t.dtype], tuple(t.shape), t.stride(), 0)))
        if dynamic:
            n = facts.n_returns
            operands.extend([Operand(Role.OUT, None)] * n)
        if not (random or scalars or dynamic or seen["conj"] or seen["neg"]):
            native = native_form(facts.op, args, kwargs, tuple(operands), tuple(params))
            if native is not None:
                return native, tuple(written)
        return Form("extern", tuple(operands), tuple(params), tuple(sorted(attrs.items()))), tuple(written)


#: Dtypes that meta kernels compute in a wider one.
_WIDENED = frozenset({torch.float16, torch.bfloat16})


def _wide(a: Any) -> Any:
    return a.to(torch.float32).as_strided(a.shape, a.stride()) if isinstance(a, Tensor) and a.dtype in _WIDENED else a


def _convolution_format(call: Call) -> torch.memory_format:
    """Layout of a convolution's result on the CPU: channels last where input or weight is. The meta kernel forgets that."""
    formats = {suggested_format(t) for t in call.args[:2]}
    return torch.channels_last if torch.channels_last in formats else torch.contiguous_format


#: Operators that return a result and its statistics.
_NORMS = frozenset({"aten.native_layer_norm.default", "aten.native_group_norm.default"})


def _statistics_dtype(call: Call) -> torch.dtype:
    """The CPU keeps statistics in float32 only where a half precision input has float32 weights. Meta kernels always do."""
    found = tensors_of(call)
    return found[0].dtype if all(t.dtype is found[0].dtype for t in found) else torch.float32


def _is_conv3d_channels_last(facts: OpFacts, call: Call) -> bool:
    """Convolutions over volumes that are not laid out plainly: the layout of the result depends on the library's choice."""
    if not facts.name.startswith("aten.convolution"):
        return False
    return any(t.dim() == 5 and not t.is_contiguous() for t in tensors_of(call))


def _call(facts: OpFacts, args: list[Any], kwargs: dict[str, Any], where: str) -> Any:
    """Call the operator. Some take Python numbers for tensors and some do not; for these they become tensors."""
    if facts.host_at is not None:
        args[facts.host_at] = torch.tensor(args[facts.host_at])
    like = next((a for a in args if isinstance(a, Tensor)), None)
    numbers = [i for i, a in enumerate(args) if isinstance(a, (bool, int, float, complex)) and facts.wants_tensor[i]]
    try:
        return facts.op(*args, **kwargs)
    except RuntimeError:
        if not numbers or like is None:
            raise
    for i in numbers:
        dtype = torch.result_type(torch.empty((0,) * min(1, like.dim()), dtype=like.dtype), args[i])
        args[i] = torch.tensor(args[i], dtype=dtype, device=where)
    return facts.op(*args, **kwargs)


def _check_multinomial(call: Call) -> None:
    if call.args[0].dim() and call.args[0].shape[-1] > 1 << 24:
        raise RuntimeError("number of categories cannot exceed 2^24")


def _check_normal(call: Call) -> None:
    out = call.kwargs.get("out")
    if out is not None:  # its size takes part, unless both are tensors
        given = [a for a in call.args[:2] if isinstance(a, Tensor)]
        for at in range(-1, -1 - min(given[0].dim(), out.dim()), -1) if len(given) == 1 else ():
            a, b = given[0].shape[at], out.shape[at]
            if a != b and 1 not in (a, b):
                raise RuntimeError(
                    f"The size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton dimension "
                    f"{max(given[0].dim(), out.dim()) + at}"
                )


#: What kernels refuse that neither meta kernels nor a trial on few elements see, by operator.
_CHECKS: dict[str, Callable[[Call], None]] = {"multinomial": _check_multinomial, "normal": _check_normal}

#: Operators that may write an element twice.
_FILLS = frozenset({"aten.fill_.Scalar", "aten.fill_.Tensor", "aten.zero_.default"})


def overlaps(t: Tensor) -> bool:
    """Whether elements of `t` share memory in the way that expanded tensors do."""
    return 0 in t.stride() and any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True)) and t.numel() > 0


def once(t: Tensor) -> Tensor:
    """`t` with every element of its memory named once, where it is expanded."""
    if not overlaps(t):
        return t
    return t.as_strided([1 if s == 0 else n for n, s in zip(t.shape, t.stride(), strict=True)], t.stride())


def refuse_overlap(t: Tensor) -> None:
    """Raise ATen's error for writing into an expanded tensor.

    Raises:
        RuntimeError: it is one.
    """
    if overlaps(t):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def _refuse_overlap(facts: OpFacts, call: Call) -> None:
    if facts.mutable and facts.name not in _FILLS:
        for name in facts.written:
            for t in tree_leaves(call.kwargs[name] if name in call.kwargs else call.args[facts.positions[name]]):
                if isinstance(t, Tensor):
                    refuse_overlap(t)


def column_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a batch of matrices laid out by columns."""
    if len(sizes) < 2:
        return storage.contiguous_strides(sizes)
    turned = storage.contiguous_strides((*sizes[:-2], sizes[-1], sizes[-2]))
    return (*turned[:-2], turned[-1], turned[-2])


def _seen_as(a: Tensor, t: Tensor) -> Tensor:
    """`t` as a conjugate or negative view where `a` is one."""
    t = t.conj() if a.is_conj() else t
    return torch._neg_view(t) if a.is_neg() else t


def stand_in(a: Any, limit: int | None = None) -> Any:
    """A call's argument on the host: tensors become zeros of the same kind, with at most `limit` elements per dimension."""
    if isinstance(a, Tensor):
        if raw_device(a).type != "wooly":
            return a
        if limit is not None:
            return torch.zeros([min(n, limit) for n in a.shape], dtype=a.dtype)
        return _seen_as(a, torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).zero_())
    if isinstance(a, (list, tuple)):
        return [stand_in(x, limit) for x in a]
    return torch.device("cpu") if isinstance(a, torch.device) else a


def tensors_of(call: Call) -> list[Tensor]:
    """All tensors among a call's arguments, in order."""
    return [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor)]


def _has_mask_index(facts: OpFacts, call: Call) -> bool:
    if facts.op.overloadpacket.__name__ != "index" or len(call.args) < 2:
        return False
    indices = call.args[1]
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


def view_of(t: Tensor) -> View:
    """The WIS view of a device tensor."""
    return View(DTYPES[t.dtype], tuple(t.shape), t.stride(), storage.address_of(t) & storage.OFFSET_MASK)


def number_of(t: Tensor) -> tuple[Any, DType | None]:
    """A host scalar met among device tensors: its value, and its dtype unless PyTorch made it from a Python number.

    Raises:
        RuntimeError: `t` is not 0-dimensional; mixing devices is the error that CUDA gives.
    """
    if t.dim() != 0 or not t.is_cpu:
        raise mixed_devices([t])
    return t.item(), None if is_python_number(t) else DTYPES[t.dtype]


_PROBE = {
    torch.float64: torch.zeros((), dtype=torch.float16),
    torch.int64: torch.zeros((), dtype=torch.int8),
    torch.complex128: torch.zeros((), dtype=torch.complex64),
}


def is_python_number(t: Tensor) -> bool:
    """Whether PyTorch made this 0-dimensional host tensor from a Python number (it then promotes like one)."""
    if t.dtype is torch.bool:
        return True  # a bool promotes alike either way
    probe = _PROBE.get(t.dtype)
    return probe is not None and torch.result_type(t, probe) is probe.dtype


def kind_of(value: Any) -> ParamKind:
    """The param kind of a Python number."""
    if isinstance(value, bool):
        return ParamKind.BOOL
    if isinstance(value, int):
        return ParamKind.I64
    if isinstance(value, float):
        return ParamKind.F64
    return ParamKind.C128


def constant(a: Any) -> Attr:
    """The WIS form of a constant argument.

    Raises:
        NotImplementedError: no such constant exists in WIS.
    """
    if a is None or isinstance(a, (bool, int, float, complex, str)):
        return a
    if isinstance(a, torch.dtype):
        return DTYPES[a]
    if isinstance(a, torch.device):
        return Symbol("device", "self")
    if isinstance(a, torch.layout):
        return Symbol("layout", str(a).removeprefix("torch."))
    if isinstance(a, torch.memory_format):
        return Symbol("memory_format", str(a).removeprefix("torch."))
    raise NotImplementedError(f"an argument of type {type(a).__name__} cannot travel to the wooly device")


__all__ = [
    "DTYPES",
    "TORCH_DTYPES",
    "Call",
    "OpFacts",
    "Plan",
    "PlanBuilder",
    "ResizeOutError",
    "constant",
    "is_python_number",
    "kind_of",
    "number_of",
    "tensors_of",
    "view_of",
]
