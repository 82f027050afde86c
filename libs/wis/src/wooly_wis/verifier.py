"""Checks a decoded program against the laws of WIS before anything runs. In a shared context this is the wall between tenants.

Form laws are checked once per form (and remembered), program laws once per program; what is left for each run is one comparison
per slot: is the bound buffer as large as `ProgramFacts.slot_bytes` says.
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
    """Upper bounds on what a program may ask of a reader."""

    instructions: int = MAX_INSTRUCTIONS
    forms: int = MAX_FORMS
    slots: int = MAX_REFERENCES
    references: int = MAX_REFERENCES
    params: int = MAX_PARAMS
    nodes: int = MAX_NODES


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """What a run must satisfy.

    Attributes:
        slot_bytes: bytes that the buffer bound to each slot must have.
        slot_alloc: size in bytes if the program allocates the slot, else None.
        slot_freed: whether the program frees the slot.
        alloc_bytes: sum of all sizes that the program allocates.
        kept_bytes: the part of `alloc_bytes` that the program does not free itself.
    """

    slot_bytes: tuple[int, ...]
    slot_alloc: tuple[int | None, ...]
    slot_freed: tuple[bool, ...]
    alloc_bytes: int
    kept_bytes: int


class Verifier:
    """Verifies programs, remembering the forms that it has seen.

    Args:
        limits: bounds on sizes and counts.
        remember: number of forms kept.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS, remember: int = 65536) -> None:
        self._limits = limits
        self._remember = remember
        #: By identity: a reader that keeps decoded forms (see `codec.split_program`) has each only once.
        self._good: OrderedDict[int, tuple[Form, tuple[int, ...]]] = OrderedDict()

    def verify_form(self, form: Form, instruction: int | None = None) -> tuple[int, ...]:
        """Bytes that each operand's buffer must have.

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
            program: decoded.
            ends: per form what `verify_form` found, from a reader that keeps forms: all are good, and no two are the same.

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
                raise VerifyError("slots do not fit the form's operands", instruction=i, law="arity")
            for slot, end in zip(instruction.slots, mine, strict=True):
                if slot > len(need):
                    raise VerifyError(f"slot {slot} is used before slot {len(need)}", instruction=i, law="slot-order")
                if slot == len(need):
                    need.append(0)
                    alloc.append(end if form.opcode == "alloc" else None)
                    freed.append(False)
                elif form.opcode == "alloc":
                    raise VerifyError(f"slot {slot} is allocated again", instruction=i, law="alloc-first")
                if freed[slot]:
                    raise VerifyError(f"slot {slot} is used after its free", instruction=i, law="use-after-free")
                size = alloc[slot]
                if size is not None and end > size:
                    raise VerifyError(
                        f"a view reaches byte {end} of slot {slot}, which has {size}", instruction=i, law="bounds"
                    )
                if end > need[slot]:
                    need[slot] = end
            if form.opcode == "free":
                freed[instruction.slots[0]] = True
        if next_form != len(program.forms):
            raise VerifyError(f"form {next_form} is never used", law="form-used")
        if len(need) > self._limits.slots:
            raise VerifyError(f"{len(need)} slots, at most {self._limits.slots}", law="limits")
        total = sum(size for size in alloc if size is not None)
        kept = sum(s for s, gone in zip(alloc, freed, strict=True) if s is not None and not gone)
        return ProgramFacts(tuple(need), tuple(alloc), tuple(freed), total, kept)

    def _check_counts(self, program: Program, *, known: bool) -> None:
        limits, forms = self._limits, program.forms
        if len(program.body) > limits.instructions:
            raise VerifyError(f"{len(program.body)} instructions, at most {limits.instructions}", law="limits")
        if len(forms) > limits.forms:
            raise VerifyError(f"{len(forms)} forms, at most {limits.forms}", law="limits")
        params = references = 0
        for i, instruction in enumerate(program.body):
            if not i & 127:
                pause()
            params += len(forms[instruction.form].params)
            references += len(instruction.slots)
        if params > limits.params:
            raise VerifyError(f"more than {limits.params} params", law="limits")
        if references > limits.references:
            raise VerifyError(f"slots are named {references} times, at most {limits.references}", law="limits")
        if known:
            return
        if sum([nodes_of(f) for f in forms]) > limits.nodes:
            raise VerifyError(f"more than {limits.nodes} operands and values in all forms", law="limits")
        seen: set[bytes] = set()
        for form in forms:
            pause()
            seen.add(encode_form(form))
        if len(seen) != len(forms):
            raise VerifyError("a form is listed twice", law="form-unique")


def nodes_of(form: Form) -> int:
    """Operands and values of attributes in a form: what decoding it takes grows with them."""

    def values(value: Attr) -> int:
        return 1 + sum([values(v) for v in value]) if isinstance(value, tuple) else 1

    pause()
    return len(form.operands) + sum([values(value) for _, value in form.attrs])


def verify_program(program: Program, limits: Limits = DEFAULT_LIMITS) -> ProgramFacts:
    """Check one program; see `Verifier.verify`."""
    return Verifier(limits).verify(program)
