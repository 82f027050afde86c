"""Small values that this process can compute itself, so that the script need not wait for the device.

A script that asks ``if step > limit:`` waits for one bool. Often the operands of the comparison are known here: they were
uploaded as small tensors, or read before. Then the instructions that computed the value are computed on the host, if they are in
the open program or in the one before. If an operand is not known, this operand is read in place of the value: the wait is the
same, and the next comparison with it needs none.

Only operators whose results have the same bits on all devices are computed here (`_EXACT`, `_EXACT_EXTERNS`). An operand that
another operator computes is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from wooly_wis.codec import decode_form
from wooly_wis.dtypes import DType
from wooly_wis.optable import TABLE
from wooly_wis.program import Attr, Form, OperandRef, ParamKind, ParamRef, Role, Symbol, View

from wooly.dtypes import TORCH_DTYPES
from wooly.interned_forms import Forms, InternedForm
from wooly.link import Link, ViewKey
from wooly.recorder import Recorded, Recorder
from wooly.sync_debug import sync_debug

#: Maximum size, in bytes, of a tensor that is computed here, or kept when it is uploaded.
MAX_BYTES = 32 << 10
#: Maximum number and size, in bytes, of operands that are read in place of a value.
_MAX_READS, _MAX_READ_BYTES = 2, 256
#: Maximum number of instructions that are computed for one value.
_MAX_STEPS = 48
#: Maximum number of words of programs that are searched for what computed a value. The search takes about 0.1 us for each.
_MOST_WORDS = 400
#: Number of words up to which programs are searched whatever their last instruction is.
_FEW_WORDS = 48
#: Number of programs whose parts are kept: an open and a sent one of two devices.
_MOST_PARSED = 4
#: Maximum number of operands of the last instruction.
_MOST_OPERANDS = 5

_Numbers = Sequence[float | int]
_INTEGERS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
_HALVES = frozenset((torch.float16, torch.bfloat16))
_FLOATS = _HALVES | {torch.float32, torch.float64}
#: Dtypes of tensors that are computed or kept here.
REAL = _INTEGERS | _FLOATS
#: Dtypes in which one addition or multiplication is rounded once, on every device.
_ROUNDED_ONCE = _INTEGERS | {torch.float32, torch.float64}


class _Exact(NamedTuple):
    """How an opcode is computed on the host.

    Attributes:
        call: takes the arguments of the opcode's row, in order.
        dtypes: dtypes for which the result has the same bits on all devices.
        signed_zeros: whether devices may differ in the sign of a result that is zero.
    """

    call: Callable[..., Tensor]
    dtypes: frozenset[torch.dtype] = REAL
    signed_zeros: bool = False


def _unscaled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operator that also takes a factor, with the factor 1: with another one, some devices round once, others twice."""

    def compute(a: Any, b: Any, alpha: float) -> Tensor:
        if alpha != 1:
            raise _Unknown
        return call(a, b)

    return compute


def _of_tensors(a: Any, b: Any) -> Tensor:
    """A quotient of two tensors. Some devices multiply by the reciprocal of a number."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype is not b.dtype:
        raise _Unknown
    return torch.div(a, b)


def _extreme(whole: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, dims, keepdim: whole(a, dim=dims, keepdim=keepdim)


def _truth(whole: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, dims, keepdim: whole(a) if dims is None and not keepdim else whole(a, dim=dims, keepdim=keepdim)


class _Unknown(Exception):
    """The value cannot be computed on the host with the bits of all devices."""


_EXACT: Mapping[str, _Exact] = {
    **{
        name: _Exact(getattr(torch, name))
        for name in (
            *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not", "isnan"),
            *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "neg", "abs", "floor", "ceil", "trunc"),
            *("where", "masked_fill"),
        )
    },
    **{
        name: _Exact(getattr(torch, name), signed_zeros=True)
        for name in ("maximum", "minimum", "clamp", "clamp_min", "clamp_max")
    },
    "amax": _Exact(_extreme(torch.amax), signed_zeros=True),
    "amin": _Exact(_extreme(torch.amin), signed_zeros=True),
    "add": _Exact(_unscaled(torch.add), _ROUNDED_ONCE),
    "sub": _Exact(_unscaled(torch.sub), _ROUNDED_ONCE),
    "rsub": _Exact(_unscaled(torch.rsub), _ROUNDED_ONCE),
    "mul": _Exact(torch.mul, _ROUNDED_ONCE),
    "div": _Exact(_of_tensors, frozenset((torch.float32, torch.float64))),
    "div_floor": _Exact(lambda a, b: torch.div(a, b, rounding_mode="floor"), _INTEGERS),
    "remainder": _Exact(torch.remainder, _INTEGERS),
    "sqrt": _Exact(torch.sqrt, frozenset((torch.float32, torch.float64))),
    "sum": _Exact(lambda a, dims, keepdim, dtype: torch.sum(a, dim=dims, keepdim=keepdim, dtype=dtype), _INTEGERS),
    "any": _Exact(_truth(torch.any)),
    "all": _Exact(_truth(torch.all)),
    "concat": _Exact(lambda parts, dim: torch.cat(parts, dim)),
    "index_select": _Exact(torch.index_select),
    "gather": _Exact(torch.gather),
    "embedding": _Exact(lambda weight, index, _: torch.embedding(weight, index)),
}
#: Library operators, and the dtypes for which their results have the same bits on all devices.
_EXACT_EXTERNS: Mapping[str, frozenset[torch.dtype]] = {
    "aten.any.dim": REAL,
    "aten.all.dim": REAL,
    "aten.isin.Tensor_Tensor": REAL,
    "aten.isin.Tensor_Scalar": REAL,
    "aten.cumsum.default": _INTEGERS,
    "aten.prod.default": _INTEGERS,
    "aten.prod.dim_int": _INTEGERS,
    "aten.flip.default": REAL,
    "aten.isinf.default": REAL,
    "aten.index.Tensor": REAL,
}
#: Library operators whose shapes depend on data, and the same.
_EXACT_DYNAMIC: Mapping[str, frozenset[torch.dtype]] = {
    "aten.nonzero.default": REAL,
    "aten.masked_select.default": REAL,
    "aten.repeat_interleave.Tensor": _INTEGERS,
    "aten._unique2.default": _INTEGERS,
    "aten.unique_consecutive.default": _INTEGERS,
    "aten.bincount.default": _INTEGERS,
}


class _Rule(NamedTuple):
    """How the instructions of one form are computed.

    Attributes:
        call: takes the operands (None for the result) and the params.
        inputs: positions and views of the operands that are read.
        result: position of the operand that is written.
        view: its view.
        signed_zeros: as in `_Exact`.
    """

    call: Callable[[Sequence[Tensor | None], _Numbers], Tensor]
    inputs: tuple[tuple[int, ViewKey], ...]
    result: int
    view: ViewKey
    signed_zeros: bool


class Range(NamedTuple):
    """A small dense part of a buffer that must be read."""

    buffer: int
    view: ViewKey


def key_of(view: View) -> ViewKey:
    """The key under which a link keeps the host copy of a view."""
    return view.offset, TORCH_DTYPES[view.dtype], view.sizes, view.strides


def nbytes_of(key: ViewKey) -> int:
    """Size of the elements of a view, in bytes."""
    n = key[1].itemsize
    for size in key[2]:
        n *= size
    return n


def tensor_on(memory: Any, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A dense tensor of at least one element on a buffer of Python. `dtype` must be one of `REAL`.

    It takes a third of the time of a tensor whose memory is PyTorch's.
    """
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)


def _is_dense(key: ViewKey) -> bool:
    """Whether a view covers its memory without gaps, each address once."""
    expected = 1
    for stride, size in sorted(zip(key[3], key[2], strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def part_of(host: Tensor, whole: ViewKey, part: ViewKey) -> Tensor | None:
    """A part of a host copy, as a view with the sizes and strides of `part`; None if the copy does not cover it.

    Args:
        host: the copy, with the strides of `whole`.
        whole: what was copied.
        part: what is wanted of the same buffer.
    """
    if whole == part:
        return host
    begin, dtype, shape, stride = part
    if dtype is not whole[1] or 0 in shape or tuple(host.stride()) != tuple(whole[3]) or not _is_dense(whole):
        return None
    distance, rest = divmod(begin - whole[0], dtype.itemsize)
    last = distance + sum([(n - 1) * s for n, s in zip(shape, stride, strict=True)])
    if rest or distance < 0 or last >= host.numel():
        return None
    return host.as_strided(shape, stride, int(host.storage_offset()) + distance)


def wait_as_cuda(recorder: Recorder, link: Link) -> None:
    """Do what a script may expect of a call that needs no wait here, because it waits on CUDA.

    Copies to pinned memory that were started before have arrived after it.
    """
    if sync_debug.mode:
        sync_debug.note()
    if recorder.has_deferred:
        recorder.flush()
    if link.has_fetches:
        link.finish_reads()


class HostValues:
    """Computes small values of the open programs.

    Attributes:
        forms: the interned forms.
    """

    def __init__(self, forms: Forms) -> None:
        self.forms = forms
        self._rules: dict[int, _Rule | None] = {}
        self._dynamic: dict[int, Form | None] = {}
        self._parsed: tuple[_Parsed, ...] = ()

    def known(self, link: Link, buffer: int, key: ViewKey) -> Tensor | None:
        """A view of a host copy that the link keeps, of this part or of more of the buffer; None if there is none."""
        for whole, host in link.mirrors_of(buffer).items():
            found = part_of(host, whole, key)
            if found is not None:
                return found
        return None

    def find(self, recorder: Recorder, link: Link, buffer: int, key: ViewKey) -> Value | None:
        """How a value can be computed here; None if it must be read.

        Args:
            recorder: the recorder of the device.
            link: its link.
            buffer: the buffer of the value.
            key: the view of the buffer.
        """
        if recorder.recording or link.recording or link.log is not None or link.shares_now:
            return None  # a bundle of `wooly record` has each read; other processes see the work before a read
        programs = recorder.recent_programs(_MOST_WORDS)
        writer = next((p for p in reversed(programs) if buffer in p.slot_of), None)
        if writer is None or not self._may_compute(writer.words, writer.slot_of[buffer], recorder.free_form):
            return None
        value = Value(self, recorder, link, programs)
        return value if value.resolve(buffer, key) else None

    def _may_compute(self, words: list[int], slot: int, free: int) -> bool:
        """Whether to search for what computed a slot: a guess from the last words, because most values must be read."""
        known, end = self.forms.known, len(words)
        while end >= 2 and words[end - 2] == free:
            end -= 2
        if not end or words[end - 1] != slot:  # not the last result
            return end <= _FEW_WORDS
        for arity in range(1, min(end, _MOST_OPERANDS + 1)):
            number = words[end - 1 - arity]
            if number < len(known) and known[number].arity == arity and self.rule(number) is not None:
                return True
        return False

    def now(self, recorder: Recorder, link: Link, buffer: int, key: ViewKey) -> Tensor | None:
        """A small value that is known, or can be computed here without a read; None if it cannot."""
        if link.is_early(buffer):
            return None
        known = self.known(link, buffer, key)
        if known is not None or nbytes_of(key) > MAX_BYTES:
            return known
        value = self.find(recorder, link, buffer, key)
        return None if value is None or value.reads or value.early else value.compute(())

    def results(self, recorder: Recorder, form: int, buffers: Sequence[int], params: _Numbers) -> list[Tensor] | None:
        """The results of an operator whose shapes depend on data, if all its operands are known here and the results are small.

        Args:
            recorder: the recorder of the device.
            form: number of the form of the call.
            buffers: buffers of the operands.
            params: values of the params.
        """
        if form not in self._dynamic:
            decoded = decode_form(self.forms.known[form].raw)
            name = str(decoded.attr("name"))
            dtypes = [TORCH_DTYPES[o.view.dtype] for o in decoded.operands if o.view is not None]
            exact = _EXACT_DYNAMIC.get(name, frozenset()).issuperset(dtypes) and all(
                o.role is not Role.INOUT for o in decoded.operands
            )
            self._dynamic[form] = decoded if exact and not _attributes(decoded) else None
        call, link = self._dynamic[form], recorder.link
        if call is None or link is None or recorder.recording or link.recording or link.log is not None:
            return None
        operands: list[Tensor | None] = []
        for buffer, operand in zip(buffers, call.operands, strict=False):
            if operand.view is not None and operand.role is Role.IN:
                operands.append(self.now(recorder, link, buffer, key_of(operand.view)))
                if operands[-1] is None:
                    return None
        try:
            found = _library_call(call)(operands, params)
        except (_Unknown, RuntimeError, TypeError, ValueError, IndexError):
            return None  # the device reports what is wrong
        results = [found] if isinstance(found, Tensor) else list(found)
        return results if sum(t.nbytes for t in results) <= MAX_BYTES else None

    def parsed(self, program: Recorded) -> _Parsed:
        """The instructions of a program."""
        found = next((p for p in self._parsed if p.words is program.words and p.cuts == program.cuts), None)
        if found is None:
            found = _Parsed(program)
            self._parsed = (*self._parsed[1 - _MOST_PARSED :], found)  # threads with other recorders may do so, too
        found.parse(program.bind, self.forms.known)
        return found

    def rule(self, form: int) -> _Rule | None:
        """How the instructions of a form are computed; None: not on the host."""
        try:
            return self._rules[form]
        except KeyError:
            rule = self._rules[form] = _rule_of(decode_form(self.forms.known[form].raw))
            return rule


class _Parsed:
    """Where the instructions of a program are. A program that has grown is parsed on from where it ended.

    Attributes:
        words: the words of the program.
        starts: where the words and the params of each instruction begin.
        writers: the instructions that write each buffer.
    """

    def __init__(self, program: Recorded) -> None:
        self.words, self.cuts = program.words, program.cuts
        self.starts: list[tuple[int, int]] = []
        self.writers: dict[int, list[int]] = {}
        self._end = self._first = 0

    def parse(self, bind: list[int], known: list[InternedForm]) -> None:
        """Go on to the end of the words."""
        words, starts, writers = self.words, self.starts, self.writers
        at, first, end = self._end, self._first, len(self.words)
        while at < end:
            form = known[words[at]]
            for k in form.writes:
                buffer = bind[words[at + 1 + k]]
                if buffer in writers:
                    writers[buffer].append(len(starts))
                else:
                    writers[buffer] = [len(starts)]
            starts.append((at, first))
            at += 1 + form.arity
            first += len(form.param_format)
        self._end, self._first = at, first


class Value:
    """A value that is computed on the host from operands that are known, and from some that must be read first.

    Attributes:
        early: buffers of operands whose host copies are on their way.
    """

    def __init__(self, values: HostValues, recorder: Recorder, link: Link, programs: list[Recorded]) -> None:
        self._values, self._recorder, self._link, self._programs = values, recorder, link, programs
        #: An instruction has a number: those of the first program, then those of the second one, `self._first[1]` and up.
        self._parsed = [values.parsed(program) for program in programs]
        self._first = list(accumulate([len(p.starts) for p in self._parsed], initial=0))
        self._computed: dict[int, Callable[[], Tensor] | None] = {}
        self._visited = 0
        self._read: dict[Range, Tensor | None] = {}
        self.early: set[int] = set()
        self._result: Callable[[], Tensor] | None = None

    @property
    def reads(self) -> list[Range]:
        """What must be read."""
        return list(self._read)

    def resolve(self, buffer: int, key: ViewKey) -> bool:
        """Find out how the value is computed. Returns False if it must be read itself."""
        self._result = self._source(buffer, key, self._first[-1])
        return self._result is not None and Range(buffer, key) not in self._read

    def compute(self, hosts: Sequence[Tensor]) -> Tensor | None:
        """The value; None if the library refuses the operands, or if the value may differ between devices.

        Args:
            hosts: host copies of `reads`, in the same order.
        """
        for place, host in zip(self._read, hosts, strict=True):
            self._read[place] = host
        assert self._result is not None
        try:
            return self._result()
        except (_Unknown, RuntimeError, TypeError, ValueError, IndexError):
            return None  # the device computes it, and reports what is wrong

    def _source(self, buffer: int, key: ViewKey, before: int) -> Callable[[], Tensor] | None:
        """What computes a view of a buffer as it is before a step; None if it cannot be known."""
        if nbytes_of(key) > MAX_BYTES:
            return None
        written = [
            first + step
            for first, p in zip(self._first, self._parsed, strict=False)
            for step in p.writers.get(buffer, ())
        ]
        writer = next((step for step in reversed(written) if step < before), None)
        is_current = not written or writer == written[-1]
        if is_current:
            known = self._values.known(self._link, buffer, key)
            if known is not None:
                if self._link.is_early(buffer):
                    self.early.add(buffer)
                return lambda: known
        else:
            overwritten = self._overwritten(buffer, key, next(step for step in written if step >= before), written)
            if overwritten is not None:
                return lambda: overwritten
        if writer is not None:
            program, at, _ = self._place(writer)
            rule, computed = self._values.rule(program.words[at]), self._step(writer)
            if computed is not None and rule is not None:
                return partial(_part, computed, rule.view, key)
        return self._to_read(buffer, key) if is_current else None

    def _overwritten(self, buffer: int, key: ViewKey, writer: int, written: list[int]) -> Tensor | None:
        """A host copy of a view of a buffer as it was before the instruction `writer` wrote it; None if there was none."""
        for first, program in zip(self._first, self._programs, strict=False):
            kept, begin = program.overwritten.get(buffer, ({}, 0))
            if kept and writer == next((step for step in written if step >= first + begin), None):
                return next(
                    (p for p in (part_of(host, whole, key) for whole, host in kept.items()) if p is not None), None
                )
        return None

    def _place(self, step: int) -> tuple[Recorded, int, int]:
        """The program of an instruction, and where its words and its params begin."""
        which = 0 if step < self._first[1] else 1
        return self._programs[which], *self._parsed[which].starts[step - self._first[which]]

    def _to_read(self, buffer: int, key: ViewKey) -> Callable[[], Tensor] | None:
        """What gives a part of a buffer that will be read, behind all that is recorded."""
        place = Range(buffer, key)
        if place not in self._read:
            if len(self._read) >= _MAX_READS or not 0 < nbytes_of(key) <= _MAX_READ_BYTES or not _is_dense(key):
                return None
            if not self._is_alive(buffer) or self._link.is_shared(buffer):
                return None
            self._read[place] = None

        def host() -> Tensor:
            read = self._read[place]
            assert read is not None
            return read

        return host

    def _is_alive(self, buffer: int) -> bool:
        """Whether the script still has a buffer of these programs."""
        for program in reversed(self._programs):
            if buffer in program.slot_of:
                return not self._recorder.frees(buffer)
            if buffer in program.bind:
                return False
        return False

    def _step(self, index: int) -> Callable[[], Tensor] | None:
        """What computes the result of a step."""
        if index not in self._computed:
            if self._visited >= _MAX_STEPS:
                return None
            self._visited += 1
            self._computed[index] = self._new_step(index)
        return self._computed[index]

    def _new_step(self, index: int) -> Callable[[], Tensor] | None:
        program, at, first = self._place(index)
        number = program.words[at]
        rule, form = self._values.rule(number), self._values.forms.known[number]
        if rule is None:
            return None
        buffers = [program.bind[slot] for slot in program.words[at + 1 : at + 1 + form.arity]]
        params = program.params[first : first + len(form.param_format)]
        read, early, computed = dict(self._read), set(self.early), dict(self._computed)
        sources: list[Callable[[], Tensor] | None] = [None] * len(buffers)
        for k, key in rule.inputs:
            source = self._source(buffers[k], key, index)
            if source is None:
                # What was found for the other operands may need reads that nobody needs now.
                self._read, self.early = read, early
                self._computed = {k: c for k, c in self._computed.items() if c is None or k in computed}
                return None
            sources[k] = source
        result: Tensor | None = None

        def compute() -> Tensor:
            nonlocal result
            if result is None:
                result = _laid_out(rule, rule.call([s and s() for s in sources], params))
            return result

        return compute


def _part(computed: Callable[[], Tensor], whole: ViewKey, key: ViewKey) -> Tensor:
    """A part of a computed value.

    Raises:
        _Unknown: the value does not cover it.
    """
    found = part_of(computed(), whole, key)
    if found is None:
        raise _Unknown
    return found


def _laid_out(rule: _Rule, host: Tensor) -> Tensor:
    """The result of an instruction with the strides of its view.

    Raises:
        _Unknown: it is not what the instruction computes, or devices may compute another sign of zero.
    """
    _, dtype, shape, stride = rule.view
    if host.dtype is not dtype or tuple(host.shape) != tuple(shape):
        raise _Unknown
    if rule.signed_zeros and dtype in _FLOATS and bool((host == 0).any()):
        raise _Unknown
    if tuple(host.stride()) == tuple(stride):
        return host
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu").copy_(host)


# -- rules ---------------------------------------------------------------------------------------------------------------


def _rule_of(form: Form) -> _Rule | None:
    views = [operand.view for operand in form.operands]
    written = [k for k, operand in enumerate(form.operands) if operand.role is not Role.IN]
    if len(written) != 1 or None in views or ParamKind.C128 in form.params:
        return None
    keys = [key_of(view) for view in views if view is not None]
    result = written[0]
    if not _is_dense(keys[result]) or max(map(nbytes_of, keys)) > MAX_BYTES:
        return None
    inputs = tuple([(k, key) for k, key in enumerate(keys) if form.operands[k].role is not Role.OUT])
    found = _call_of(form, [key[1] for key in keys])
    if found is None:
        return None
    call, signed_zeros = found
    in_place = form.operands[result].role is Role.INOUT
    if in_place:
        dtype = keys[result][1]
        computed = call

        def call(operands: Sequence[Tensor | None], params: _Numbers) -> Tensor:
            value = computed(operands, params)
            if value.dtype is not dtype and not _converts(value.dtype, dtype):
                raise _Unknown
            return value.to(dtype)

    return _Rule(call, inputs, result, keys[result], signed_zeros)


def _converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether conversions are exact, or rounded alike on all devices."""
    return source in REAL and target in REAL and (source in _INTEGERS or target in _FLOATS or target is torch.bool)


def _call_of(
    form: Form, dtypes: Sequence[torch.dtype]
) -> tuple[Callable[[Sequence[Tensor | None], _Numbers], Tensor], bool] | None:
    """What computes a form, and whether devices may differ in the sign of a zero; None: not on the host."""
    if form.opcode == "copy":
        source, target = dtypes
        return (lambda operands, _: _given(operands[0]).to(target), False) if _converts(source, target) else None
    if form.opcode == "fill":
        view, value = form.operands[0].view, form.attr("value")
        assert view is not None
        if dtypes[0] not in REAL:
            return None
        return lambda _, params: torch.full(
            view.sizes, _argument(value, (), params), dtype=dtypes[0], device="cpu"
        ), False
    if _attributes(form):
        return None
    if form.opcode == "extern":
        return _extern(form, dtypes)
    row, exact = TABLE.get(form.opcode), _EXACT.get(form.opcode)
    if row is None or exact is None or not exact.dtypes.issuperset(dtypes):
        return None
    if form.params and not _HALVES.isdisjoint(dtypes):  # devices round the number to 16 or to 32 bits
        return None
    given = form.attr("args", ())
    assert isinstance(given, tuple)
    attrs = given + tuple([arg.default for arg in row.args[len(given) :]])
    return (lambda operands, params: exact.call(*[_argument(a, operands, params) for a in attrs])), exact.signed_zeros


def _extern(
    form: Form, dtypes: Sequence[torch.dtype]
) -> tuple[Callable[[Sequence[Tensor | None], _Numbers], Tensor], bool] | None:
    exact = _EXACT_EXTERNS.get(str(form.attr("name")))
    inputs = [d for d, operand in zip(dtypes, form.operands, strict=True) if operand.role is Role.IN]
    if exact is None or not exact.issuperset(inputs) or len(inputs) == len(dtypes):
        return None
    return _library_call(form), False


def _attributes(form: Form) -> set[str]:
    """The attributes that change how a form is computed: flags, dtypes of host scalars, conjugated operands."""
    return {name for name, _ in form.attrs} - {"args", "kwargs", "name"}


def _library_call(form: Form) -> Callable[[Sequence[Tensor | None], _Numbers], Any]:
    """The call of the library operator that a form names."""
    args, kwargs = form.attr("args", ()), form.attr("kwargs", ())
    _, packet, overload = str(form.attr("name")).split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    assert isinstance(args, tuple)
    assert isinstance(kwargs, tuple)
    named = [pair for pair in kwargs if isinstance(pair, tuple)]
    return lambda operands, params: op(
        *[_argument(a, operands, params) for a in args],
        **{str(name): _argument(value, operands, params) for name, value in named},
    )


def _given(operand: Tensor | None) -> Tensor:
    assert operand is not None
    return operand


def _argument(attr: Attr, operands: Sequence[Tensor | None], params: _Numbers) -> Any:
    """The value of an attribute of a form.

    Raises:
        _Unknown: it is of a kind that only devices use.
    """
    if isinstance(attr, OperandRef):
        return operands[attr.index]
    if isinstance(attr, ParamRef):
        return params[attr.index]
    if isinstance(attr, DType):
        return TORCH_DTYPES[attr]
    if isinstance(attr, tuple):
        return [_argument(a, operands, params) for a in attr]
    if isinstance(attr, Symbol):
        raise _Unknown
    return attr
