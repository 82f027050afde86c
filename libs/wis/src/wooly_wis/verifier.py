"""Checks a decoded program against the laws of WIS before the program runs. These checks isolate tenants in a shared context.

The laws of forms are checked once per form (the verifier remembers forms), the laws of programs once per program. Each run then
needs one comparison per slot: whether the bound buffer has at least `ProgramFacts.slot_bytes` bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from wooly_wis.codec import encode_form
from wooly_wis.errors import VerifyError
from wooly_wis.laws import FORM_LAWS
from wooly_wis.limits import MAX_FORMS, MAX_INSTRUCTIONS, MAX_NODES, MAX_PARAMS, MAX_REFERENCES
from wooly_wis.pauses import pause
from wooly_wis.program import Attr, Form, Program


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds on a program's counts."""

    instructions: int = MAX_INSTRUCTIONS
    forms: int = MAX_FORMS
    slots: int = MAX_REFERENCES
    references: int = MAX_REFERENCES
    params: int = MAX_PARAMS
    nodes: int = MAX_NODES


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """What the verifier found out about a program. A run must satisfy `slot_bytes`.

    Attributes:
        slot_bytes: per slot, the minimum size in bytes of the bound buffer.
        slot_alloc: per slot, its size in bytes if the program allocates the slot, else None.
        slot_freed: per slot, whether the program frees the slot.
        alloc_bytes: sum of all sizes that the program allocates.
        kept_bytes: the part of `alloc_bytes` that the program does not free itself.
    """

    slot_bytes: tuple[int, ...]
    slot_alloc: tuple[int | None, ...]
    slot_freed: tuple[bool, ...]
    alloc_bytes: int
    kept_bytes: int


class Verifier:
    """Verifies programs, and remembers the forms that it has verified.

    Args:
        limits: bounds on sizes and counts.
        remember: maximum number of remembered forms.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS, remember: int = 65536) -> None:
        self._limits = limits
        self._remember = remember
        #: Keyed by identity. A reader that keeps decoded forms (see `codec.split_program`) has each form only once.
        self._good: OrderedDict[int, tuple[Form, tuple[int, ...]]] = OrderedDict()

    def verify_form(self, form: Form, instruction: int | None = None) -> tuple[int, ...]:
        """Minimum size, in bytes, of each operand's buffer.

        Raises:
            VerifyError: the form breaks a law.
        """
        known = self._good.get(id(form))
        if known is not None and known[0] is form:
            self._good.move_to_end(id(form))
            return known[1]
        for law in FORM_LAWS:
            pause()
            complaint = law.check(form)
            if complaint is not None:
                raise VerifyError(f"{form.opcode}: {complaint}", instruction=instruction, law=law.name)
        ends = tuple([0 if o.view is None else o.view.end for o in form.operands])
        self._good[id(form)] = (form, ends)
        if len(self._good) > self._remember:
            self._good.popitem(last=False)
        return ends

    def verify(self, program: Program, ends: Sequence[tuple[int, ...]] | None = None) -> ProgramFacts:
        """Check a whole program.

        Args:
            program: the decoded program.
            ends: per form, the result of `verify_form`. A reader that keeps forms passes this; then all forms are valid and
                different.

        Raises:
            VerifyError: names the instruction and the law.
        """
        self._check_counts(program, known=ends is not None)
        found: list[tuple[int, ...] | None] = [None] * len(program.forms)
        need: list[int] = []
        alloc: list[int | None] = []
        freed: list[bool] = []
        next_form = 0
        for i, instruction in enumerate(program.body):
            if not i & 15 or len(instruction.slots) > 64:
                pause()
            index = instruction.form
            if index > next_form:
                raise VerifyError(f"form {index} is used before form {next_form}", instruction=i, law="form-order")
            form = program.forms[index]
            if index == next_form:
                next_form += 1
                found[index] = self.verify_form(form, i) if ends is None else ends[index]
            mine = found[index]
            assert mine is not None
            if len(instruction.slots) != len(form.operands):
                raise VerifyError(
                    f"it has {len(instruction.slots)} slots, its form has {len(form.operands)} operands",
                    instruction=i,
                    law="arity",
                )
            for slot, end in zip(instruction.slots, mine, strict=True):
                if slot > len(need):
                    raise VerifyError(f"slot {slot} is used before slot {len(need)}", instruction=i, law="slot-order")
                if slot == len(need):
                    need.append(0)
                    alloc.append(end if form.opcode == "alloc" else None)
                    freed.append(False)
                elif form.opcode == "alloc":
                    raise VerifyError(
                        f"slot {slot} is allocated, but it was used before", instruction=i, law="alloc-first"
                    )
                if freed[slot]:
                    raise VerifyError(f"slot {slot} is used after its free", instruction=i, law="use-after-free")
                size = alloc[slot]
                if size is not None and end > size:
                    raise VerifyError(
                        f"a view reaches byte {end} of slot {slot}, which has {size} bytes", instruction=i, law="bounds"
                    )
                if end > need[slot]:
                    need[slot] = end
            if form.opcode == "free":
                freed[instruction.slots[0]] = True
        if next_form != len(program.forms):
            raise VerifyError(f"form {next_form} is never used", law="form-used")
        if len(need) > self._limits.slots:
            raise VerifyError(f"it has {len(need)} slots, the limit is {self._limits.slots}", law="limits")
        total = sum(size for size in alloc if size is not None)
        kept = sum(s for s, gone in zip(alloc, freed, strict=True) if s is not None and not gone)
        return ProgramFacts(tuple(need), tuple(alloc), tuple(freed), total, kept)

    def _check_counts(self, program: Program, *, known: bool) -> None:
        limits, forms = self._limits, program.forms
        if len(program.body) > limits.instructions:
            raise VerifyError(
                f"it has {len(program.body)} instructions, the limit is {limits.instructions}", law="limits"
            )
        if len(forms) > limits.forms:
            raise VerifyError(f"it has {len(forms)} forms, the limit is {limits.forms}", law="limits")
        params = references = 0
        for i, instruction in enumerate(program.body):
            if not i & 127:
                pause()
            params += len(forms[instruction.form].params)
            references += len(instruction.slots)
        if params > limits.params:
            raise VerifyError(f"it has {params} params, the limit is {limits.params}", law="limits")
        if references > limits.references:
            raise VerifyError(f"it has {references} slot references, the limit is {limits.references}", law="limits")
        if known:
            return
        if sum([nodes_of(f) for f in forms]) > limits.nodes:
            raise VerifyError(
                f"its forms have more than {limits.nodes} operands and attribute values, which is the limit",
                law="limits",
            )
        seen: set[bytes] = set()
        for form in forms:
            pause()
            seen.add(encode_form(form))
        if len(seen) != len(forms):
            raise VerifyError("a form is listed twice", law="form-unique")


def nodes_of(form: Form) -> int:
    """Number of operands and attribute values in a form. The cost of decoding the form grows with this number."""
    pause()
    return len(form.operands) + sum([_values(value) for _, value in form.attrs])


def _values(value: Attr) -> int:
    return 1 + sum([_values(v) for v in value]) if isinstance(value, tuple) else 1


def verify_program(program: Program, limits: Limits = DEFAULT_LIMITS) -> ProgramFacts:
    """Check one program; see `Verifier.verify`."""
    return Verifier(limits).verify(program)
