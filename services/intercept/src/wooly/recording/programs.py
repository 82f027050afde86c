"""What the programs of a bundle do with their slots, and programs with a part of their instructions. It does not know torch."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property

from wooly_wis.codec import decode_program, digest, encode_program
from wooly_wis.dtypes import DType
from wooly_wis.errors import WisError
from wooly_wis.frames import Run
from wooly_wis.program import Form, Instruction, ParamKind, Program, Role, View
from wooly_wis.verifier import ProgramFacts, verify_program

from wooly.recording.bundle import Bundle, BundleError, RunFrame

#: Number of decoded programs that are kept.
_DECODED_KEPT = 1024


@dataclass
class SlotUse:
    """What a program does with one slot.

    Attributes:
        born: whether the slot's buffer comes into being in the program.
        made: index of the first instruction that writes it; None: it is not written.
        written: index of the last instruction that writes it.
        read: first view through which it is read; None: it is not read.
        view: the largest dense view; None: there is none.
        dtype: dtype of its last view; bytes if there is none.
        freed: whether the program frees it.
    """

    born: bool = False
    made: int | None = None
    written: int | None = None
    read: View | None = None
    view: View | None = None
    dtype: DType = DType.U8
    freed: bool = False

    def use(self, index: int, role: Role, view: View | None, *, allocates: bool) -> None:
        """Note an operand of the instruction with this index."""
        if allocates:
            self.born = True
            return
        if role is not Role.IN:
            if view is None and self.written is None and self.read is None:
                self.born = True  # only the executor knows its size
            self.made = index if self.made is None else self.made
            self.written = index
        if role is not Role.OUT and self.read is None:
            self.read = view
        self.view = larger(self.view, view)
        self.dtype = self.dtype if view is None else view.dtype


def larger(one: View | None, other: View | None) -> View | None:
    """The larger dense view; if they are equally large, the first."""
    if other is None or not other.dense or (one is not None and _nbytes(one) >= _nbytes(other)):
        return one
    return other


def _nbytes(view: View) -> int:
    return view.numel * view.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """A program with a part of the instructions of another program.

    Attributes:
        raw: its canonical bytes.
        slots: for each of its slots, the slot of the other program.
        words: the first and the end of its params among the words of the other program's params.
        first: index of its first instruction in the other program.
        end: index after its last instruction.
    """

    raw: bytes
    slots: tuple[int, ...]
    words: tuple[int, int]
    first: int
    end: int

    def bindings(self, run: Run) -> list[int]:
        """The buffers of its slots in a run of the other program."""
        return [run.bindings[slot] for slot in self.slots]

    def params(self, run: Run) -> bytes:
        """Its params in a run of the other program."""
        return run.params[8 * self.words[0] : 8 * self.words[1]]


class Decoded:
    """One program, checked.

    Attributes:
        raw: its canonical bytes.
        program: the program.
        facts: what the verifier found out.

    Raises:
        WisError: the program is not valid.
    """

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.program: Program = decode_program(raw)
        self.facts: ProgramFacts = verify_program(self.program)
        self._words = [0]
        for instruction in self.program.body:
            kinds = self.program.forms[instruction.form].params
            self._words.append(self._words[-1] + sum([2 if k is ParamKind.C128 else 1 for k in kinds]))

    @cached_property
    def digest(self) -> bytes:
        """The digest that names it."""
        return digest(self.raw)

    @cached_property
    def names(self) -> list[str]:
        """Name of each instruction: its opcode, or the library operator or kernel that it calls."""
        of_form = [name_of(form) for form in self.program.forms]
        return [of_form[i.form] for i in self.program.body]

    @cached_property
    def slots(self) -> list[SlotUse]:
        """What it does with each slot."""
        found = [SlotUse() for _ in range(self.program.n_slots)]
        for index, instruction in enumerate(self.program.body):
            form = self.program.forms[instruction.form]
            for slot, operand in zip(instruction.slots, form.operands, strict=True):
                if form.opcode == "free":
                    found[slot].freed = True
                else:
                    found[slot].use(index, operand.role, operand.view, allocates=form.opcode == "alloc")
        return found

    def form(self, index: int) -> Form:
        """The form of an instruction."""
        return self.program.forms[self.program.body[index].form]

    def check(self, frame: RunFrame) -> None:
        """Check that a run binds all slots and params.

        Raises:
            BundleError: it does not.
        """
        run = frame.run
        if len(run.bindings) != self.program.n_slots or len(run.params) != 8 * self._words[-1]:
            raise BundleError(
                f"frame {frame.number} binds another number of buffers or params than its program has; the bundle is not valid"
            )

    def piece(self, first: int, end: int) -> Piece:
        """The instructions from `first` to before `end` as a program of their own."""
        forms: dict[int, int] = {}
        slots: dict[int, int] = {}
        body = []
        for instruction in self.program.body[first:end]:
            form = forms.setdefault(instruction.form, len(forms))
            body.append(Instruction(form, tuple([slots.setdefault(s, len(slots)) for s in instruction.slots])))
        raw = encode_program(Program(tuple([self.program.forms[f] for f in forms]), tuple(body)))
        return Piece(raw, tuple(slots), (self._words[first], self._words[end]), first, end)


def name_of(form: Form) -> str:
    """The opcode of a form, or the name of the library operator or kernel that it calls."""
    return str(form.attr("name") or form.attr("entry") or form.opcode)


class Programs:
    """The programs of a bundle, decoded when they are needed."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._decoded: OrderedDict[int, Decoded] = OrderedDict()

    def of(self, frame: RunFrame) -> Decoded:
        """The program of a run.

        Raises:
            BundleError: the program is not valid, or the run does not fit it.
        """
        number = frame.program
        found = self._decoded.get(number)
        if found is None:
            try:
                found = self._decoded[number] = Decoded(self._bundle.program(number))
            except WisError as e:
                lines, at = self._bundle.origins(frame.origins), getattr(e, "instruction", None)
                where = f", recorded at {lines[at]}" if at is not None and at < len(lines) else ""
                raise BundleError(f"the program of frame {frame.number} is not valid{where}: {e}") from e
            if len(self._decoded) > _DECODED_KEPT:
                self._decoded.popitem(last=False)
        else:
            self._decoded.move_to_end(number)
        found.check(frame)
        return found
