"""The laws that a single form obeys. A row: name, the law in a sentence, a check that returns a complaint or None."""

from __future__ import annotations

from dataclasses import dataclass

from wooly_wis.dtypes import DType
from wooly_wis.errors import RuleError
from wooly_wis.externs import is_allowed
from wooly_wis.foreign import ATTRS as LAUNCH_ATTRS
from wooly_wis.foreign import OPCODE as LAUNCH
from wooly_wis.foreign import launch_of
from wooly_wis.law import Law
from wooly_wis.optable import TABLE, check
from wooly_wis.pauses import pause
from wooly_wis.program import Attr, Form, OperandRef, ParamKind, ParamRef, Role, View

MAX_BYTES = 1 << 40
#: Elements of a view: broadcasting repeats what few bytes hold, and neither a library nor an account counts beyond 64 bits.
MAX_ELEMENTS = 1 << 40
MAX_OPERANDS = 8192


@dataclass(frozen=True, slots=True)
class BaseOpcode:
    """An opcode whose laws are its own: memory, and calls of the library.

    Attributes:
        roles: its operands; None: whatever the operator needs.
        attrs: names of its attributes.
        says: what it does.
    """

    roles: tuple[Role, ...] | None
    attrs: frozenset[str]
    says: str


BASE: dict[str, BaseOpcode] = {
    "alloc": BaseOpcode((Role.OUT,), frozenset(), "defines the slot: a buffer of that many bytes, all zero"),
    "free": BaseOpcode((Role.IN,), frozenset(), "ends the buffer; the slot may not be used again"),
    "copy": BaseOpcode((Role.IN, Role.OUT), frozenset(), "out = a, converted to out's dtype"),
    "fill": BaseOpcode((Role.OUT,), frozenset({"value"}), "every element of out = value"),
    "extern": BaseOpcode(
        None,
        frozenset({"args", "conj", "kwargs", "name", "neg", "rng", "scalars", "vjp", "wanted"}),
        "an operator of the device's library, from the allow-list; `rng` is the (seed, offset) pair that it draws with, "
        "so that a replay draws the same numbers; `conj` and `neg` are operands that are read conjugated, and negated; "
        "`wanted` are operands whose gradients somebody wants (a library may choose its kernels by that); "
        "with `vjp`, the gradients of its results, those gradients come out instead of the results",
    ),
    LAUNCH: BaseOpcode(
        None,
        LAUNCH_ATTRS,
        "a kernel in another language: function `entry` of the source whose digest is `source`, on `grid` groups of `block` "
        "threads; `args` are its arguments: operands, of which it may touch what their views show and no more, and scalars "
        "(dtype, value); `options` are hints",
    ),
}
_NATIVE_ATTRS = frozenset({"args"})


def _opcode_known(form: Form) -> str | None:
    return None if form.opcode in BASE or form.opcode in TABLE else "there is no such opcode"


def _operand_shape(form: Form) -> str | None:
    base = BASE.get(form.opcode)
    roles = base.roles if base is not None else None
    if roles is None:
        return None if len(form.operands) <= MAX_OPERANDS else f"{len(form.operands)} operands, at most {MAX_OPERANDS}"
    mine = tuple(o.role for o in form.operands)
    return None if mine == roles else f"operand roles are {[r.name for r in mine]}, not {[r.name for r in roles]}"


def _views_present(form: Form) -> str | None:
    for k, operand in enumerate(form.operands):
        if operand.view is None and not (
            form.opcode == "free" or (form.opcode == "extern" and operand.role is Role.OUT)
        ):
            return f"operand {k} has no view"
        if operand.view is not None and form.opcode == "free":
            return "free takes a slot, not a view"
    unknown = [o for o in form.operands if o.role is Role.OUT and o.view is None]
    if unknown and len(unknown) != sum(o.role is Role.OUT for o in form.operands):
        return "either all outputs have a view or none"
    return None


def _view_extent(form: Form) -> str | None:
    for k, operand in enumerate(form.operands):
        pause()
        view = operand.view
        if view is None:
            continue
        if any(s < 0 for s in view.sizes) or any(s < 0 for s in view.strides):
            return f"operand {k} has a negative size or stride"
        if view.offset % view.dtype.itemsize:
            return f"operand {k}: offset {view.offset} is not a multiple of the item size {view.dtype.itemsize}"
        if max(view.sizes, default=0) > MAX_BYTES or max(view.strides, default=0) > MAX_BYTES or view.end > MAX_BYTES:
            return f"operand {k} reaches beyond {MAX_BYTES} bytes"
        if view.numel > MAX_ELEMENTS:
            return f"operand {k} has more than {MAX_ELEMENTS} elements"
    return None


def overlaps_itself(view: View) -> bool:
    """Whether two elements of a view may lie at the same place (decided conservatively for exotic strides)."""
    dims = sorted((st, sz) for sz, st in zip(view.sizes, view.strides, strict=True) if sz > 1)
    if 0 in view.sizes:
        return False
    return any(stride == 0 for stride, _ in dims)


def _outputs_distinct(form: Form) -> str | None:
    for k, operand in enumerate(form.operands):
        if not k & 31:
            pause()
        if operand.role is not Role.IN and operand.view is not None and overlaps_itself(operand.view):
            return f"operand {k} is written and overlaps itself"
    return None


def _alloc_whole(form: Form) -> str | None:
    if form.opcode != "alloc":
        return None
    view = form.operands[0].view
    if view is None or view.dtype is not DType.U8 or len(view.sizes) != 1 or view.strides != (1,) or view.offset:
        return "its operand is a flat run of bytes from 0"
    return None


def _copy_shapes(form: Form) -> str | None:
    if form.opcode != "copy":
        return None
    a, b = form.operands[0].view, form.operands[1].view
    assert a is not None and b is not None
    return None if a.sizes == b.sizes else f"sizes {a.sizes} and {b.sizes} differ"


def _attrs_known(form: Form) -> str | None:
    names = [name for name, _ in form.attrs]
    wrong = sorted(set(names) - (BASE[form.opcode].attrs if form.opcode in BASE else _NATIVE_ATTRS))
    if wrong:
        return f"unknown attribute {wrong[0]!r}"
    if names != sorted(set(names)):
        return "attributes are not in order"
    if form.opcode == "fill" and "value" not in names:
        return "the attribute 'value' is missing"
    return None


def _refs_in_range(form: Form) -> str | None:
    def complaint(value: Attr) -> str | None:
        if isinstance(value, OperandRef) and value.index >= len(form.operands):
            return f"operand {value.index} of {len(form.operands)} is referred to"
        if isinstance(value, ParamRef) and value.index >= len(form.params):
            return f"param {value.index} of {len(form.params)} is referred to"
        if isinstance(value, tuple):
            pause()
            for item in value:
                found = complaint(item)
                if found:
                    return found
        return None

    for _, value in form.attrs:
        found = complaint(value)
        if found:
            return found
    return None


def _extern_allowed(form: Form) -> str | None:
    if form.opcode != "extern":
        return None
    name = form.attr("name")
    if not isinstance(name, str):
        return "the attribute 'name' is missing"
    if not is_allowed(name):
        return f"operator {name!r} is not in the allow-list"
    args, kwargs = form.attr("args", ()), form.attr("kwargs", ())
    if not isinstance(args, tuple) or not isinstance(kwargs, tuple):
        return "args and kwargs are tuples"
    for item in kwargs:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            return "kwargs are (name, value) pairs"
    rng = form.attr("rng")
    if rng is not None:
        pair = rng if isinstance(rng, tuple) else ()
        refs = [r for r in pair if isinstance(r, ParamRef)]
        if len(pair) != 2 or len(refs) != 2 or any(form.params[r.index] is not ParamKind.I64 for r in refs):
            return "rng is a pair of i64 params"
    return _reading_well_formed(form) or _vjp_well_formed(form)


def _reading_well_formed(form: Form) -> str | None:
    for name, kinds in (("conj", ("complex",)), ("neg", ("complex", "float"))):
        refs = form.attr(name)
        if refs is None:
            continue
        if not isinstance(refs, tuple) or not refs:
            return f"{name} is a tuple of operands"
        for ref in refs:
            operand = form.operands[ref.index] if isinstance(ref, OperandRef) else None
            if operand is None or operand.role is not Role.IN or operand.view is None:
                return f"{name} are operands that are read"
            if operand.view.dtype.kind not in kinds:
                return f"{name} does not go with {operand.view.dtype.label}"
        if form.attr("wanted") is not None:
            return f"{name} does not go with wanted"
    return None


def _vjp_well_formed(form: Form) -> str | None:
    wanted, grads = form.attr("wanted"), form.attr("vjp")
    if wanted is None:
        return None if grads is None else "vjp goes with wanted"
    if not isinstance(wanted, tuple) or not wanted:
        return "wanted is a tuple of operands"
    if any(not isinstance(w, OperandRef) or form.operands[w.index].role is not Role.IN for w in wanted):
        return "wanted are operands that are read"
    if grads is None:
        return None
    if not isinstance(grads, tuple) or not any(isinstance(g, OperandRef) for g in grads):
        return "vjp has an operand, or none, for the gradient of each result"
    if any(g is not None and not (isinstance(g, OperandRef) and form.operands[g.index].role is Role.IN) for g in grads):
        return "vjp has an operand, or none, for the gradient of each result"
    results = [o.view for o in form.operands if o.role is not Role.IN]
    operands = [form.operands[w.index].view for w in wanted if isinstance(w, OperandRef)]
    if len(results) != len(operands) or any(
        r is None or v is None or r.sizes != v.sizes or r.dtype is not v.dtype
        for r, v in zip(results, operands, strict=True)
    ):
        return "vjp gives one result of the same shape and dtype for each wanted operand"
    return None


def _launch(form: Form) -> str | None:
    if form.opcode != LAUNCH:
        return None
    try:
        launch_of(form)
    except RuleError as e:
        return str(e)
    return None


def _rule(form: Form) -> str | None:
    if form.opcode not in TABLE:
        return None
    try:
        check(form)
    except RuleError as e:
        return str(e)
    return None


FORM_LAWS: tuple[Law[[Form]], ...] = (
    Law("opcode", "The opcode is a row of the op table.", _opcode_known),
    Law("operands", "Operands have the roles that the opcode asks for.", _operand_shape),
    Law("views", "Every operand has a view, but for `free` and for outputs of unknown shape.", _views_present),
    Law(
        "extent",
        "Sizes and strides are not negative, offsets aligned, nothing reaches beyond 2^40 bytes or has more than 2^40 elements.",
        _view_extent,
    ),
    Law("no-overlap", "What is written does not overlap itself.", _outputs_distinct),
    Law("alloc", "`alloc` defines a flat run of bytes.", _alloc_whole),
    Law("copy", "`copy` keeps the sizes.", _copy_shapes),
    Law("attrs", "Attributes are those of the opcode, each once, in order.", _attrs_known),
    Law("refs", "References stay within the form's operands and params.", _refs_in_range),
    Law("rule", "Arguments, dtypes and sizes fit the opcode's row.", _rule),
    Law("extern", "`extern` names an allowed operator and well-formed arguments.", _extern_allowed),
    Law("launch", "`kernel.launch` names a source, a grid and well-formed arguments; operands are flat.", _launch),
)
