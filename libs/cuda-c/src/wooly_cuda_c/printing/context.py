"""The state of printing a function: its text so far, the position in it, and what is known of its values.

The printers of statements, declarations and expressions derive from `FunctionContext`. It declares the methods that they call on
each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wooly_cuda_c.printing import lockstep
from wooly_cuda_c.printing.arithmetic import POINTER, held_size, may_change
from wooly_cuda_c.printing.scope import Bound
from wooly_cuda_c.printing.types import VOID, Scalar, Type
from wooly_cuda_c.printing.values import Facts, Linear, Value, Variable
from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.tree import (
    Braces,
    Declare,
    Function,
    Loop,
    Named,
    Node,
    PointerTo,
    ReferenceTo,
    Switch,
)

if TYPE_CHECKING:
    from wooly_cuda_c.printing.translate import Instance, Translation


class FunctionContext(ABC):
    """One function while it is printed for given arguments.

    Args:
        whole: the translation of the whole kernel.
        instance: the function, with its types.
        facts: what earlier passes learned of it; this pass adds more.
    """

    def __init__(self, whole: Translation, instance: Instance, facts: Facts) -> None:
        self.whole = whole
        self.types = whole.types
        self.helpers = whole.helpers
        self.dialect = whole.dialect
        self._instance = instance
        self._function: Function = instance.function
        self._facts = facts
        self.bound = Bound(dict(instance.bound.types), dict(instance.bound.numbers))
        self._scopes: list[dict[str, Variable]] = []
        self._lines: list[str] = []
        self._indent = 1
        self._names = 0
        #: Conditions that differ between threads, innermost last: the line, and whether it is an `if`.
        self._control: list[tuple[int, bool]] = []
        #: Printed names of the mask of active threads, and of the first active thread.
        self._mask = "w_active" if instance.masked else ""
        self._first = "w_first" if instance.masked else "0u"
        #: Printed number of the thread after the last active one.
        self._past = "w_past" if instance.masked else f"{whole.threads}u"
        #: Line of a return that only some threads executed; 0 if there is none.
        self._left = 0
        self._loops: list[Loop | Switch] = []
        self.weight = 0
        self.free = 0
        self.private = 0
        self.barriers = 0
        self.blocks = 0
        #: Bytes of the block's memory for variables that are needed after a barrier.
        self.lasting = 0
        #: The error to raise if this pass learns nothing new.
        self.pending_error: CudaSourceError | None = None
        #: Whether the function is printed for the whole block.
        self._group = self.dialect.flat and (
            id(self._function) in facts.barriers or (whole.whole and self._function.kernel)
        )
        self._hoisted: list[str] = []
        #: Statements around the current one.
        self._around: list[Node] = []
        #: Number of statements around the current one that each thread executes on its own.
        self._nest = 0
        self._region = False
        #: Line at which the current loop over threads begins.
        self._region_at = 0
        #: Conditions for all threads at once, by their numbers in the text's marks (`lockstep`).
        self._assumptions: list[tuple[str, ...]] = []
        #: Whether some parts are also printed for threads in lockstep.
        self._together = self._group and whole.together
        self._fixed: dict[str, bool] = {}
        #: Arrays of pointers, which each have their bounds.
        self._kept_pointers: list[str] = []
        #: What is known of the first values of variables, by their keys.
        self._first_values: dict[int, Linear | None] = {}
        #: Whether some iterations of the last loop were printed for threads in lockstep.
        self._went_together = False
        #: Number of enclosing statements that were also printed for threads in lockstep.
        self._resting = 0
        #: Statements that are being printed for each thread on its own.
        self._alone: set[int] = set()
        self._jumps = 0
        self._label = ""
        self._continues: dict[int, str] = {}
        #: Number of enclosing expressions that not every thread may evaluate.
        self._maybe = 0

    # -- methods that the printers call on each other ----------------------------------------------------------------

    @abstractmethod
    def value(self, node: Node) -> Value:
        """Print an expression and return its value, loaded from memory."""

    @abstractmethod
    def expression(self, node: Node) -> Value:
        """Print an expression."""

    @abstractmethod
    def converted(self, value: Value, kind: Type, line: int) -> Value:
        """Convert a value to another type."""

    @abstractmethod
    def as_truth(self, value: Value, line: int) -> Value:
        """Convert a value to a condition."""

    @abstractmethod
    def loaded(self, value: Value, line: int) -> Value:
        """Load the value of an object in memory."""

    @abstractmethod
    def memory(self, value: Value, line: int) -> Value:
        """Give a value an address in memory."""

    @abstractmethod
    def built(self, kind: Type, parts: Sequence[str]) -> str:
        """Return the text that makes a vector or struct of its parts."""

    @abstractmethod
    def operate(self, op: str, a: Value, b: Value, line: int) -> Value:
        """Print a binary operation."""

    @abstractmethod
    def _truth(self, node: Node) -> Value: ...

    @abstractmethod
    def _number(self, value: Value, kind: Scalar) -> Value: ...

    @abstractmethod
    def _built(self, kind: Type, braces: Braces, line: int) -> Value: ...

    @abstractmethod
    def _at(self, pointer: Value, index: Value | None, line: int) -> Value: ...

    @abstractmethod
    def _update(self, to: Value, op: str, value: Value, line: int, before: bool) -> Value: ...

    @abstractmethod
    def _variable(self, node: Declare) -> None: ...

    @abstractmethod
    def _zero(self, kind: Type) -> str: ...

    @abstractmethod
    def _effect(self, node: Node) -> str: ...

    # -- the text, and the position in it ------------------------------------------------------------------------------

    @property
    def grouped(self) -> bool:
        """Whether the function is printed for the whole block."""
        return self._group

    def result_type(self) -> Type:
        written = self._function.result
        if isinstance(written, Named) and written.name == "auto":
            return self._facts.result or VOID
        if isinstance(written, PointerTo):
            return self._facts.result or self.types.of(written, self.bound, self._function.line)
        if isinstance(written, ReferenceTo):
            raise CudaSourceError("functions that return references are not supported", self._function.line)
        return self.types.of(written, self.bound, self._function.line)

    def _fresh(self, name: str) -> str:
        self._names += 1
        return f"v_{name.replace('$', '_')}_{self._names}"

    def _declare(self, name: str, variable: Variable, line: int) -> None:
        if name in self._scopes[-1]:
            raise CudaSourceError(f"{name} is declared twice", line)
        self._scopes[-1][name] = variable

    def _thread_line(self, text: str) -> None:
        """Add a line that every thread executes."""
        if self._group and self._nest == 0 and not self._region:
            self._region = True
            self._jumps += 1
            self._label = f"w_next_{self._jumps}"
            self._region_at = len(self._lines)
            begin = self._first if self._mask else "0u"
            self.line(f"for (w_t = {begin}; w_t < {self._past}; w_t++) {{")
            if self._left:
                self.line("  if (w_left[w_t]) continue;")
            if self._mask:
                self.line(f"  if (!{self._mask}[w_t]) continue;")
        self.line(("  " if self._region else "") + text)

    def line(self, text: str) -> None:
        """Add a line that the block executes once."""
        self._lines.append("  " * self._indent + text)

    def boundary(self) -> None:
        """End the current loop over threads: every thread reaches this point. The first thread evaluates the conditions that
        follow.
        """
        if self._region and self._nest == 0:
            self._region = False
            self.line(f"  {self._label}: ;")
            self.line("}")
            if self._together:
                region, self._lines = self._lines[self._region_at :], self._lines[: self._region_at]
                self._lines += self._versions(region)
            self.line(f"w_t = {self._first};")

    def _versions(self, region: list[str]) -> list[str]:
        """Return a loop over the threads, and before it, for the case that all its assumptions hold, the loop without checks."""
        slow = [lockstep.plain(x) for x in region]
        body = [
            x
            for x in region[1:-1]
            if not x.lstrip().startswith(("if (w_left[w_t])", f"if (!{self._mask or '-'}[w_t])"))
        ]
        if self._mask:
            return slow
        text, used = lockstep.unchecked("\n".join(body))
        conditions = [f"({x})" for k in sorted(used) for x in self._assumptions[k]]
        if self._left:
            conditions.append("!w_gone")
        indent = "  " * self._indent
        if not text or any(
            f"{name}[w_t] =" in text for name in self._kept_pointers
        ):  # LLVM 14 fails on vectors of them
            return slow
        fast = [
            indent + x
            for x in self._thread_loops(
                text.replace(f"{self._label}:", f"{self._label}_together:").replace(
                    f"goto {self._label};", f"goto {self._label}_together;"
                )
            )
        ]
        if not conditions:
            return fast
        return [
            f"{indent}if ({' && '.join(dict.fromkeys(conditions))}) {{",
            *fast,
            f"{indent}}} else {{",
            *slow,
            f"{indent}}}",
        ]

    def _thread_loops(self, body: str) -> list[str]:
        """Return loops over the threads of a block that compilers may vectorize: threads are independent between barriers."""
        block, pragma = self.whole.block, '_Pragma("clang loop vectorize(assume_safety)")'
        if sum(n > 1 for n in block) <= 1:
            return [pragma, f"for (w_t = 0u; w_t < {self.whole.threads}u; w_t++) {{", body, "}"]
        for k in range(3):
            body = body.replace(self.whole.where("tid", k), f"w_{'xyz'[k]}")
        x, y, z = block
        return [
            f"for (w_u32 w_z = 0u; w_z < {z}u; w_z++) for (w_u32 w_y = 0u; w_y < {y}u; w_y++) {{",
            pragma,
            f"for (w_u32 w_x = 0u; w_x < {x}u; w_x++) {{ w_t = (w_z * {y}u + w_y) * {x}u + w_x;",
            body,
            "} }",
        ]

    def fixed(self, name: str) -> bool:
        """Whether no statement of the function changes a variable after its declaration."""
        if name not in self._fixed:
            self._fixed[name] = not may_change(self._function.body, name, self.whole.unit.functions)
        return self._fixed[name]

    def covered(self, to: Value) -> str:
        """Return a mark for an access to an object in memory, if conditions for all threads at once are known; else nothing."""
        size = to.type.size
        if not self._together or to.linear is None or size & (size - 1):
            return ""
        return lockstep.COVERED.format(self._assumption(lockstep.within(to.linear, self.whole.block)))

    def assumed(self, condition: Value, sign: bool = True) -> str:
        """Return a condition's text, with marks if it is known when it is true, or false, in all threads."""
        known = condition.always if sign else condition.never
        if not self._together or not known:
            return condition.text
        mark = lockstep.TRUE if sign else lockstep.FALSE
        return f"{mark}{self._assumption((known,))}{lockstep.THEN}{condition.text}{lockstep.END}"

    def _assumption(self, conditions: tuple[str, ...]) -> int:
        self._assumptions.append(conditions)
        return len(self._assumptions) - 1

    def _kept(self, kind: str, size: int, name: str, n: int = 1) -> str:
        """Reserve memory for `n` objects per thread, for the whole function. It is in the block's memory, because threads take
        turns.
        """
        at, word = self.lasting, self.dialect.spaces["l"]
        if size == POINTER and kind.endswith("p"):
            self._kept_pointers.append(name)
        self.lasting += -(-size * n * self.whole.threads // 16) * 16
        self._hoisted.append(f"  {word} {kind} *{name} = ({word} {kind} *)(w_shared + W_{self._instance.name} + {at});")
        return f"{name}[w_t]"

    def kept(self, kind: str, text: str, size: int) -> str:
        """Store a value of every thread beyond the next barrier, and return the array's name."""
        name = self._fresh("kept")
        self._thread_line(f"{self._kept(kind, size, name)} = {text};")
        return name

    def votes(self, text: str) -> str:
        """Store a truth value of every thread; it is false for inactive threads."""
        name = self._fresh("votes")
        place = self._kept("w_b1", 1, name)
        if self._mask or self._left:
            self.boundary()
            self.line(f"for (w_u32 k = 0u; k < {self.whole.threads}u; k++) {name}[k] = 0;")
        self._thread_line(f"{place} = {text};")
        return name

    def room(self, kind: Type) -> str:
        """Reserve an array with one element per thread."""
        name = self._fresh("room")
        self._kept(kind.text, held_size(kind), name)
        return name

    def block_value(self, kind: str, text: str) -> str:
        """Store a value of the whole block."""
        name = self._fresh("block")
        self._hoisted.append(f"  {kind} {name};")
        self.line(f"{name} = {text};")
        return name

    def _count(self, n: int = 1) -> None:
        self.weight += n
        self.free += n
        self.whole.count_work(n, self._function.line)

    def _mark(self, variable: Variable | None) -> None:
        if variable is not None:
            self._facts.varying.add(variable.key)
            variable.value.varying = True

    @contextmanager
    def _under(self, varying: bool, line: int, choice: bool = False) -> Iterator[None]:
        if varying:
            self._control.append((line, choice))
        yield
        if varying:
            self._control.pop()

    @contextmanager
    def _conditionally(self, varying: bool, line: int) -> Iterator[None]:
        self._maybe += 1
        with self._under(varying, line):
            yield
        self._maybe -= 1

    def require_all_threads(self, what: str, line: int, warp: bool = False) -> None:
        """Raise an error unless all threads reach this point. For a warp, threads excluded by an `if` may be missing."""
        cause = 0
        if self._left:
            cause, why = self._left, "some threads returned in line {}"
        elif self._control and not (warp and self.masked):
            cause, why = self._control[-1][0], "the condition in line {} may differ between threads"
        elif self._instance.divergent and not (warp and self._instance.masked):
            cause, why = self._instance.divergent, "only some threads may get here, because of line {}"
        if cause:
            raise CudaSourceError(f"all threads of a block must reach {what}: {why.format(cause)}", line)
        if self._maybe and self.dialect.flat:
            self.pending_error = CudaSourceError(
                f"{what} inside of ?:, && or || is not supported: write it as a separate statement", line
            )
        if self._group and any(isinstance(x, Switch) for x in self._around):
            self.pending_error = CudaSourceError(f"{what} inside of a switch is not supported: use if", line)
        self.record_barrier(warp)

    @property
    def masked(self) -> bool:
        """Whether all missing threads were excluded by an `if`."""
        away = self._left or (self._instance.divergent and not self._instance.masked)
        return not away and all(choice for _, choice in self._control)

    def record_barrier(self, warp: bool) -> None:
        """Record a barrier, or an exchange within warps."""
        self.barriers += 1
        self.blocks += not warp
        self._facts.barriers.update(id(x) for x in self._around)
        self._facts.barriers.add(id(self._function))

    @property
    def cause(self) -> int:
        """The line because of which only some threads may get here; 0 if there is none."""
        return self._left or (self._control[-1][0] if self._control else 0) or self._instance.divergent

    @property
    def active(self) -> str:
        """The arguments for a function of the whole block that only some threads call: the mask of these threads, the first
        one, and the number after the last one.
        """
        return f"{self._mask}, {self._first}, {self._past}"

    def at(self, pointer: Value, line: int) -> Value:
        """Return the object that a pointer points to."""
        return self._at(pointer, None, line)

    def select(self, condition: str, a: Value, b: Value, kind: Scalar) -> Value:
        """Print the selection of one of two values by a condition."""
        return Value(f"({condition} ? {a.text} : {b.text})", kind, None, "", "", a.varying or b.varying)
