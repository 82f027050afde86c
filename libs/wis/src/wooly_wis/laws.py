"""The laws of a single form. Each law has a name, a sentence, and a check that returns a complaint or None."""

from __future__ import annotations

from dataclasses import dataclass

from wooly_wis.determinism import is_sensitive
from wooly_wis.dtypes import DType
from wooly_wis.errors import RuleError
from wooly_wis.externs import is_allowed, is_extension
from wooly_wis.flags import SAYS, followed
from wooly_wis.foreign import ATTRS as LAUNCH_ATTRS
from wooly_wis.foreign import OPCODE as LAUNCH
from wooly_wis.foreign import launch_of
from wooly_wis.law import Law
from wooly_wis.limits import MAX_SLEEP_NS
from wooly_wis.optable import TABLE, check
from wooly_wis.pauses import pause
from wooly_wis.program import Attr, Form, OperandRef, ParamKind, ParamRef, Role, View

MAX_BYTES = 1 << 40
#: Maximum number of elements of a view. Broadcasting makes large views of few bytes, and counts must stay within 64 bits.
MAX_ELEMENTS = 1 << 40
MAX_OPERANDS = 8192


@dataclass(frozen=True, slots=True)
class BaseOpcode:
    """An opcode without a row in the op table: a memory operation, a library call, or a launch of a foreign kernel.

    Attributes:
        roles: roles of the operands; None if the roles depend on the called operator.
        attrs: names of the allowed attributes.
        says: what the opcode does.
    """

    roles: tuple[Role, ...] | None
    attrs: frozenset[str]
    says: str


BASE: dict[str, BaseOpcode] = {
    "alloc": BaseOpcode(
        (Role.OUT,), frozenset(), "defines the slot: a new buffer with the view's number of bytes, all zero"
    ),
    "free": BaseOpcode((Role.IN,), frozenset(), "frees the slot's buffer; later instructions must not use the slot"),
    "copy": BaseOpcode((Role.IN, Role.OUT), frozenset(), "out = a, converted to out's dtype"),
    "fill": BaseOpcode((Role.OUT,), frozenset({"value"}), "every element of out = value"),
    "sleep": BaseOpcode((), frozenset({"ns"}), "occupies the device for `ns` nanoseconds, at most 10,000,000"),
    "extern": BaseOpcode(
        None,
        frozenset(
            {
                *("args", "conj", "deterministic", "flags", "kwargs", "name", "neg", "no_grad"),
                *("rng", "scalars", "vjp", "wanted"),
            }
        ),
        "calls an operator of the device's library from the allow-list, or an operator of an extension library that the "
        "executor offers; `alpha` of a sum or a difference may be an operand without dimensions; "
        "`rng` is the (seed, offset) pair of a random operator, "
        "so that a replay draws the same numbers; the operator reads the operands in `conj` conjugated and the operands in "
        "`neg` negated; `wanted` lists operands that need gradients (a library may choose its kernels by this list); with "
        "`vjp` (gradients of the operator's results), the instruction returns the gradients of `wanted`, not the results; "
        "with `no_grad`, the operator runs without gradients although `wanted` need them; "
        "with `deterministic`, the library must use an algorithm that gives the same bits at each run; only operators that "
        "have several algorithms may have this attribute; `flags` say what the script asked of the device's libraries",
    ),
    LAUNCH: BaseOpcode(
        None,
        LAUNCH_ATTRS,
        "launches a foreign kernel: function `entry` of the source with digest `source`, on `grid` groups of `block` threads; "
        "`args` are the kernel's arguments: operands, or scalars (dtype, value); the kernel may access only the bytes of the "
        "operands' views; `options` are hints for the compiler",
    ),
}
_NATIVE_ATTRS = frozenset({"args"})
_FLAGGED_ATTRS = frozenset({"args", "flags"})


def _opcode_known(form: Form) -> str | None:
    return None if form.opcode in BASE or form.opcode in TABLE else "the opcode is unknown"


def _operand_shape(form: Form) -> str | None:
    base = BASE.get(form.opcode)
    roles = base.roles if base is not None else None
    if roles is None:
        return (
            None
            if len(form.operands) <= MAX_OPERANDS
            else f"it has {len(form.operands)} operands, the limit is {MAX_OPERANDS}"
        )
    mine = tuple(o.role for o in form.operands)
    return (
        None
        if mine == roles
        else f"its operand roles are {[r.name for r in mine]}, but must be {[r.name for r in roles]}"
    )


def _views_present(form: Form) -> str | None:
    for k, operand in enumerate(form.operands):
        if operand.view is None and not (
            form.opcode == "free" or (form.opcode == "extern" and operand.role is Role.OUT)
        ):
            return f"operand {k} has no view"
        if operand.view is not None and form.opcode == "free":
            return "the operand of free has a view, but must be a slot without a view"
    unknown = [o for o in form.operands if o.role is Role.OUT and o.view is None]
    if unknown and len(unknown) != sum(o.role is Role.OUT for o in form.operands):
        return "some outputs have a view and some do not: give all outputs a view, or give no output a view"
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
    """Whether two elements of a view may have the same address (conservative for unusual strides)."""
    dims = sorted((st, sz) for sz, st in zip(view.sizes, view.strides, strict=True) if sz > 1)
    if 0 in view.sizes:
        return False
    return any(stride == 0 for stride, _ in dims)


def _outputs_distinct(form: Form) -> str | None:
    for k, operand in enumerate(form.operands):
        if not k & 31:
            pause()
        if operand.role is not Role.IN and operand.view is not None and overlaps_itself(operand.view):
            return f"operand {k} is written, but elements of its view overlap"
    return None


def _alloc_whole(form: Form) -> str | None:
    if form.opcode != "alloc":
        return None
    view = form.operands[0].view
    if view is None or view.dtype is not DType.U8 or len(view.sizes) != 1 or view.strides != (1,) or view.offset:
        return "its operand must be a contiguous one-dimensional u8 view at offset 0"
    return None


def _copy_shapes(form: Form) -> str | None:
    if form.opcode != "copy":
        return None
    a, b = form.operands[0].view, form.operands[1].view
    assert a is not None and b is not None
    return None if a.sizes == b.sizes else f"the operands' sizes {a.sizes} and {b.sizes} differ"


def _sleep_bounded(form: Form) -> str | None:
    if form.opcode != "sleep":
        return None
    ns = form.attr("ns")
    if type(ns) is not int or not 0 < ns <= MAX_SLEEP_NS:
        return f"the attribute 'ns' must be an integer from 1 to {MAX_SLEEP_NS}, not {ns!r}"
    return "it has params" if form.params else None


def _attrs_known(form: Form) -> str | None:
    names = [name for name, _ in form.attrs]
    native = _FLAGGED_ATTRS if followed(form.opcode) else _NATIVE_ATTRS
    wrong = sorted(set(names) - (BASE[form.opcode].attrs if form.opcode in BASE else native))
    if wrong:
        return f"unknown attribute {wrong[0]!r}"
    if names != sorted(set(names)):
        return "its attributes are not sorted by name, or an attribute occurs twice"
    if form.opcode == "fill" and "value" not in names:
        return "the attribute 'value' is missing"
    return None


def _refs_in_range(form: Form) -> str | None:
    for _, value in form.attrs:
        found = _out_of_range(form, value)
        if found:
            return found
    return None


def _out_of_range(form: Form, value: Attr) -> str | None:
    if isinstance(value, OperandRef) and value.index >= len(form.operands):
        return f"an attribute refers to operand {value.index}, but the form has {len(form.operands)} operands"
    if isinstance(value, ParamRef) and value.index >= len(form.params):
        return f"an attribute refers to param {value.index}, but the form has {len(form.params)} params"
    if isinstance(value, tuple):
        pause()
        for item in value:
            found = _out_of_range(form, item)
            if found:
                return found
    return None


def _extern_allowed(form: Form) -> str | None:
    if form.opcode != "extern":
        return None
    name = form.attr("name")
    if not isinstance(name, str):
        return "the attribute 'name' is missing"
    if not (is_allowed(name) or is_extension(name)):
        return f"operator {name!r} is not in the allow-list, and it is not the name of an extension operator"
    args, kwargs = form.attr("args", ()), form.attr("kwargs", ())
    if not isinstance(args, tuple) or not isinstance(kwargs, tuple):
        return "args and kwargs must be tuples"
    for item in kwargs:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            return "kwargs must be (name, value) pairs"
    rng = form.attr("rng")
    if rng is not None:
        pair = rng if isinstance(rng, tuple) else ()
        refs = [r for r in pair if isinstance(r, ParamRef)]
        if len(pair) != 2 or len(refs) != 2 or any(form.params[r.index] is not ParamKind.I64 for r in refs):
            return "rng must be a pair of i64 params"
    deterministic = form.attr("deterministic")
    if deterministic is not None and not (deterministic is True and is_sensitive(name)):
        return f"deterministic must be true, and only for operators that have several algorithms, not for {name}"
    return _reading_well_formed(form) or _vjp_well_formed(form)


def _flags_followed(form: Form) -> str | None:
    flags = form.attr("flags")
    if flags is None:
        return None
    if not isinstance(flags, tuple) or not flags or not all(isinstance(f, str) for f in flags):
        return "flags must be a non-empty tuple of names"
    words = [f for f in flags if isinstance(f, str)]
    name = form.attr("name") if form.opcode == "extern" else form.opcode
    follows = followed(name) if isinstance(name, str) else frozenset()
    for word in words:
        if word not in SAYS:
            return f"flag {word!r} is unknown; known are {', '.join(SAYS)}"
        if word not in follows:
            return f"flag {word!r} does not concern {name}"
    return None if words == sorted(set(words)) else "its flags are not sorted, or a flag occurs twice"


def _reading_well_formed(form: Form) -> str | None:
    for name, kinds in (("conj", ("complex",)), ("neg", ("complex", "float"))):
        refs = form.attr(name)
        if refs is None:
            continue
        if not isinstance(refs, tuple) or not refs:
            return f"{name} must be a non-empty tuple of operands"
        for ref in refs:
            operand = form.operands[ref.index] if isinstance(ref, OperandRef) else None
            if operand is None or operand.role is not Role.IN or operand.view is None:
                return f"{name} must contain only operands that are read"
            if operand.view.dtype.kind not in kinds:
                return f"{name} contains an operand of dtype {operand.view.dtype.label}, which cannot be read so"
        if form.attr("wanted") is not None:
            return f"{name} and wanted must not be used together"
    return None


def _vjp_well_formed(form: Form) -> str | None:
    wanted, grads, no_grad = form.attr("wanted"), form.attr("vjp"), form.attr("no_grad")
    if no_grad is not None and not (no_grad is True and wanted is not None and grads is None):
        return "no_grad must be true, and needs the attribute wanted without vjp"
    if wanted is None:
        return None if grads is None else "vjp needs the attribute wanted"
    if not isinstance(wanted, tuple) or not wanted:
        return "wanted must be a non-empty tuple of operands"
    if any(not isinstance(w, OperandRef) or form.operands[w.index].role is not Role.IN for w in wanted):
        return "wanted must contain only operands that are read"
    if grads is None:
        return None
    if not isinstance(grads, tuple) or not any(isinstance(g, OperandRef) for g in grads):
        return "vjp must have one entry per result: the operand with the result's gradient, or none"
    if any(g is not None and not (isinstance(g, OperandRef) and form.operands[g.index].role is Role.IN) for g in grads):
        return "vjp must have one entry per result: the operand with the result's gradient, or none"
    results = [o.view for o in form.operands if o.role is not Role.IN]
    operands = [form.operands[w.index].view for w in wanted if isinstance(w, OperandRef)]
    if len(results) != len(operands) or any(
        r is None or v is None or r.sizes != v.sizes or r.dtype is not v.dtype
        for r, v in zip(results, operands, strict=True)
    ):
        return "with vjp, the results must be one gradient per wanted operand, with the operand's shape and dtype"
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
    Law("operands", "Operands have the roles of the opcode.", _operand_shape),
    Law("views", "Every operand has a view, except for `free` and for outputs of unknown shape.", _views_present),
    Law(
        "extent",
        "Sizes and strides are not negative, offsets are aligned, views end within 2^40 bytes and have at most 2^40 elements.",
        _view_extent,
    ),
    Law("no-overlap", "The elements of a written view do not overlap.", _outputs_distinct),
    Law("alloc", "The operand of `alloc` is a contiguous one-dimensional view of bytes.", _alloc_whole),
    Law("copy", "The operands of `copy` have the same sizes.", _copy_shapes),
    Law("sleep", "The time of `sleep` is at most 10 ms.", _sleep_bounded),
    Law("attrs", "Attributes belong to the opcode, occur once, and are sorted by name.", _attrs_known),
    Law("refs", "References in attributes name existing operands and params of the form.", _refs_in_range),
    Law("rule", "Arguments, dtypes and sizes match the opcode's row.", _rule),
    Law(
        "extern",
        "`extern` names an allowed operator or an extension operator, with well-formed arguments.",
        _extern_allowed,
    ),
    Law(
        "flags",
        "Flags are known, sorted, occur once, and are among those that the operator follows.",
        _flags_followed,
    ),
    Law(
        "launch",
        "`kernel.launch` names a source, a grid and well-formed arguments; operands are contiguous and one-dimensional.",
        _launch,
    ),
)
