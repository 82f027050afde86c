"""Prints one function: every load, store and atomic checked, every loop with an end, arithmetic without undefined results.

Signed numbers are added as unsigned ones, shifts keep to the width, quotients by 0 are 0, all variables begin as 0: what is
undefined would let a vendor's compiler take a check away. Barriers must be where all threads of a block come by, or none;
what says so is what varies from thread to thread (`Facts`), learned by printing the function until nothing new is found.

A device that runs a block's threads in turn (`Dialect.flat`) is not left to cut kernels at their barriers: PoCL decides some
conditions around them once for threads that differ. A function with barriers is printed for the whole block: what is between
two barriers is a loop over the threads, `w_t` counts them, and every variable has a place per thread. Conditions and loops
around barriers are the block's: they are decided once. Some threads alone may exchange values within their warps: then those
that take part are marked, and the others pass by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from wooly_wis.cudac.errors import CudaSourceError
from wooly_wis.cudac.tree import (
    Alias,
    ArrayOf,
    Assign,
    Binary,
    Block,
    Braces,
    Call,
    Cast,
    Conditional,
    Declare,
    Express,
    Function,
    If,
    Index,
    Leave,
    Loop,
    Member,
    Name,
    Named,
    Node,
    Number,
    PointerTo,
    ReferenceTo,
    Return,
    SizeOf,
    Switch,
    Unary,
    Written,
)

from wooly_compiler.cudac import builtins
from wooly_compiler.cudac.helpers import PASS
from wooly_compiler.cudac.scope import Bound, folded_binary, folded_unary, literal
from wooly_compiler.cudac.types import (
    B1,
    I32,
    U32,
    U64,
    VOID,
    Array,
    Pointer,
    Scalar,
    Struct,
    Type,
    Vector,
    Void,
    common,
    promoted,
    wrapped,
)
from wooly_compiler.cudac.values import Facts, Value, Variable

if TYPE_CHECKING:
    from wooly_compiler.cudac.translate import Instance, Translation

#: Nodes that may be done without asking whether the launch is to end.
FREE: Final = 20_000
#: Bytes of a pointer with its bounds.
POINTER: Final = 24
#: Turns of a loop that is not asked.
FREE_TURNS: Final = 1024
_WORDS: Final = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "div",
    "%": "rem",
    "&": "and",
    "|": "or",
    "^": "xor",
    "<<": "shl",
    ">>": "shr",
}
_ASKS: Final = ("==", "!=", "<", ">", "<=", ">=")


class FunctionPrinter:
    """Prints one function for given arguments.

    Args:
        whole: the translation it is part of.
        instance: which function, with which types.
        facts: what is known of it already; more is added.
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
        #: lines of conditions on which threads differ, innermost last; whether it is an `if`
        self._control: list[tuple[int, bool]] = []
        #: array of who takes part, and the first that does
        self._mask = "w_active" if instance.masked else ""
        self._first = "w_first" if instance.masked else "0u"
        #: line of a return that only some threads took
        self._left = 0
        self._loops: list[Loop | Switch] = []
        self.weight = 0
        self.free = 0
        self.private = 0
        self.barriers = 0
        self.blocks = 0
        #: bytes of a block's memory for what lasts over barriers
        self.lasting = 0
        #: what is wrong if nothing more is learned
        self.complaint: CudaSourceError | None = None
        #: printed for the whole block
        self._group = self.dialect.flat and id(self._function) in facts.barriers
        self._hoisted: list[str] = []
        #: statements around this one
        self._around: list[Node] = []
        #: how many of them are one thread's
        self._nest = 0
        self._region = False
        self._jumps = 0
        self._label = ""
        self._continues: dict[int, str] = {}
        #: inside of what is not done by every thread that does the statement
        self._maybe = 0

    # -- the whole -----------------------------------------------------------------------------------------------------

    def run(self) -> str:
        """The function's text."""
        function, instance = self._function, self._instance
        params = []
        self._scopes.append({})
        start: list[tuple[str, str]] = []
        for param, value in zip(function.params, instance.arguments, strict=True):
            name = self._fresh(param.name)
            reference = isinstance(param.type, ReferenceTo)
            kind = value.type
            text = f"w_{value.space}p" if reference else kind.text
            held_text = name
            if self._group and not function.kernel:
                params.append(f"{self.dialect.spaces['l']} {text} *{name}")
                held_text = f"{name}[w_t]"
            else:
                params.append(f"{text} {name}")
                if self._group and _changes(function.body, param.name):
                    held_text = self._kept(text, POINTER if reference else held_size(kind), name + "_own")
                    start.append((held_text, name))
            key = id(param)
            varying = value.varying or key in self._facts.varying
            if reference:
                held = Value(held_text, kind, None, "mem", value.space, varying, value.root, value.readonly)
            else:
                space = "l" if held_text != name else "p"
                held = Value(held_text, kind, None, "var", space, varying, self._facts.roots.get(key, value.root))
                self.private += kind.size
            variable = Variable(key, held, reference)
            held.variable = variable
            self._declare(param.name, variable, param.line)
        for to, of in start:
            self._say(f"{to} = {of};")
        assert function.body is not None
        self._block(function.body)
        self.boundary()
        kind = self.result_type()
        context = self.whole.context
        result = kind.text
        tail = []
        if self._group:
            if not isinstance(kind, Void):
                params.append(f"{self.dialect.spaces['l']} {kind.text} *w_result")
            result = "void"
            if self._left:
                self._kept("w_u8", 1, "w_left")
                self._hoisted.append(f"  for (w_t = 0u; w_t < {self.whole.threads}u; w_t++) w_left[w_t] = 0;")
                self._hoisted.append("  w_t = 0u;")
            if instance.masked:
                params += [f"{self.dialect.spaces['l']} w_b1 *w_active", "w_u32 w_first"]
                self._hoisted.append("  w_t = w_first;")
        elif not isinstance(kind, Void):
            tail = [f"  {kind.text} none = {self._zero(kind)};", "  return none;"]
        head = f"{self.dialect.function} {result} {instance.name}({', '.join([context, *params])})"
        return "\n".join([head + " {", *self._hoisted, *self._lines, *tail, "}\n"])

    @property
    def grouped(self) -> bool:
        """Whether it is printed for the whole block."""
        return self._group

    def result_type(self) -> Type:
        written = self._function.result
        if isinstance(written, Named) and written.name == "auto":
            return self._facts.result or VOID
        if isinstance(written, PointerTo):
            return self._facts.result or self.types.of(written, self.bound, self._function.line)
        if isinstance(written, ReferenceTo):
            raise CudaSourceError("functions that give references are not understood", self._function.line)
        return self.types.of(written, self.bound, self._function.line)

    def _fresh(self, name: str) -> str:
        self._names += 1
        return f"v_{name.replace('$', '_')}_{self._names}"

    def _declare(self, name: str, variable: Variable, line: int) -> None:
        if name in self._scopes[-1]:
            raise CudaSourceError(f"{name} is declared twice", line)
        self._scopes[-1][name] = variable

    def _say(self, text: str) -> None:
        """A line of what every thread does."""
        if self._group and self._nest == 0 and not self._region:
            self._region = True
            self._jumps += 1
            self._label = f"w_next_{self._jumps}"
            self.line(f"for (w_t = 0u; w_t < {self.whole.threads}u; w_t++) {{")
            if self._left:
                self.line("  if (w_left[w_t]) continue;")
            if self._mask:
                self.line(f"  if (!{self._mask}[w_t]) continue;")
        self.line(("  " if self._region else "") + text)

    def line(self, text: str) -> None:
        """A line of what the block does."""
        self._lines.append("  " * self._indent + text)

    def boundary(self) -> None:
        """Every thread has got here. Conditions that follow are asked of the first thread."""
        if self._region and self._nest == 0:
            self._region = False
            self.line(f"  {self._label}: ;")
            self.line("}")
            self.line(f"w_t = {self._first};")

    def _kept(self, kind: str, size: int, name: str, n: int = 1) -> str:
        """A place per thread for `n` objects, for the whole function: in the block's memory, as threads take turns."""
        at, word = self.lasting, self.dialect.spaces["l"]
        self.lasting += -(-size * n * self.whole.threads // 16) * 16
        self._hoisted.append(f"  {word} {kind} *{name} = ({word} {kind} *)(w_shared + W_{self._instance.name} + {at});")
        return f"{name}[w_t]"

    def kept(self, kind: str, text: str, size: int) -> str:
        """A value of every thread, put where it lasts; the array's name."""
        name = self._fresh("kept")
        self._say(f"{self._kept(kind, size, name)} = {text};")
        return name

    def votes(self, text: str) -> str:
        """Answers of all threads: of those that are not here, no."""
        name = self._fresh("votes")
        place = self._kept("w_b1", 1, name)
        if self._mask or self._left:
            self.boundary()
            self.line(f"for (w_u32 k = 0u; k < {self.whole.threads}u; k++) {name}[k] = 0;")
        self._say(f"{place} = {text};")
        return name

    def room(self, kind: Type) -> str:
        """An array with a place per thread."""
        name = self._fresh("room")
        self._kept(kind.text, held_size(kind), name)
        return name

    def block_value(self, kind: str, text: str) -> str:
        """A value of the whole block."""
        name = self._fresh("block")
        self._hoisted.append(f"  {kind} {name};")
        self.line(f"{name} = {text};")
        return name

    def _count(self, n: int = 1) -> None:
        self.weight += n
        self.free += n
        self.whole.spend(n, self._function.line)

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
    def _perhaps(self, varying: bool, line: int) -> Iterator[None]:
        self._maybe += 1
        with self._under(varying, line):
            yield
        self._maybe -= 1

    def all_threads(self, what: str, line: int, warp: bool = False) -> None:
        """Some threads alone must not come by; those of a warp may, where they were told apart by an `if`."""
        cause = 0
        if self._left:
            cause, why = self._left, "some threads have returned in line {}"
        elif self._control and not (warp and self.masked):
            cause, why = self._control[-1][0], "threads of a block may disagree on line {}"
        elif self._instance.divergent and not (warp and self._instance.masked):
            cause, why = self._instance.divergent, "some threads alone may come here, by line {}"
        if cause:
            raise CudaSourceError(f"{what} must be where all threads of a block come by: {why.format(cause)}", line)
        if self._maybe and self.dialect.flat:
            self.complaint = CudaSourceError(f"{what} inside of ?:, && or ||: put it into a statement of its own", line)
        if self._group and any(isinstance(x, Switch) for x in self._around):
            self.complaint = CudaSourceError(f"{what} inside of a switch is not understood: use if", line)
        self.meet(warp)

    @property
    def masked(self) -> bool:
        """Whether threads that are not here were all told apart by an `if`."""
        away = self._left or (self._instance.divergent and not self._instance.masked)
        return not away and all(choice for _, choice in self._control)

    def meet(self, warp: bool) -> None:
        """There is a barrier here, or an exchange within warps."""
        self.barriers += 1
        self.blocks += not warp
        self._facts.barriers.update(id(x) for x in self._around)
        self._facts.barriers.add(id(self._function))

    @property
    def cause(self) -> int:
        """The line because of which some threads alone may be here; 0 if there is none."""
        return self._left or (self._control[-1][0] if self._control else 0) or self._instance.divergent

    @property
    def active(self) -> str:
        """Arguments of a function for the whole block that some threads alone call: who they are, and the first."""
        return f"{self._mask}, {self._first}"

    def at(self, pointer: Value, line: int) -> Value:
        """The object that a pointer points to."""
        return self._at(pointer, None, line)

    def select(self, condition: str, a: Value, b: Value, kind: Scalar) -> Value:
        """One of two values, by a text."""
        return Value(f"({condition} ? {a.text} : {b.text})", kind, None, "", "", a.varying or b.varying)

    # -- statements ----------------------------------------------------------------------------------------------------

    def _block(self, block: Block) -> None:
        if block.scope:
            self._scopes.append({})
            types, numbers = dict(self.bound.types), dict(self.bound.numbers)
        for statement in block.body:
            self._statement(statement)
        if block.scope:
            self._scopes.pop()
            self.bound.types, self.bound.numbers = types, numbers

    def _nested(self, statement: Node) -> None:
        self._indent += 1
        self._block(
            statement if isinstance(statement, Block) and statement.scope else Block(statement.line, [statement])
        )
        self._indent -= 1

    def _statement(self, node: Node) -> None:
        self._count()
        compound = isinstance(node, If | Loop | Switch) or (isinstance(node, Block) and node.scope)
        mine = self._group and compound and (self._nest > 0 or id(node) not in self._facts.barriers)
        if mine:
            self._say("{")
            self._nest += 1
        self._around.append(node)
        self._statement_of(node)
        self._around.pop()
        if mine:
            self._nest -= 1
            self._say("}")

    def _statement_of(self, node: Node) -> None:
        match node:
            case Block():
                if node.scope:
                    self._nested_of("{", node, "}")
                else:
                    self._block(node)
            case Express(value=value):
                text = "" if value is None else self._effect(value)
                if text:
                    self._say(text + ";")
            case Declare():
                self._variable(node)
            case If():
                self._if(node)
            case Loop():
                if self._whole_block(node):
                    self._loop_of_block(node)
                else:
                    self._loop(node)
            case Return():
                self._return(node)
            case Leave():
                self._leave(node)
            case Switch():
                self._switch(node)
            case Alias():
                self.bound.types[node.name] = self.types.of(node.type, self.bound, node.line)
            case _:
                raise CudaSourceError("this statement is not understood", node.line)

    def _whole_block(self, node: Node) -> bool:
        """Whether a statement around barriers is the block's."""
        return self._group and self._nest == 0 and id(node) in self._facts.barriers

    def _nested_of(self, head: str, node: Node, tail: str) -> None:
        """A statement with what is before and after it."""
        if self._group and self._nest == 0:
            self.boundary()
            self.line(head)
            self._nested(node)
            self.boundary()
            self.line(tail)
        else:
            self._say(head)
            self._nested(node)
            self._say(tail)

    def _effect(self, node: Node) -> str:
        """An expression that is done for what it does."""
        if isinstance(node, Unary) and node.op in ("p++", "p--"):
            node = Unary(node.line, node.op[1:], node.on)
        if isinstance(node, Binary) and node.op == ",":
            return ", ".join(x for x in (self._effect(node.left), self._effect(node.right)) if x)
        value = self.expression(node)
        if value.place == "mem" or not value.text:
            return ""
        return f"(void)({value.text})"

    def _if(self, node: If) -> None:
        condition = self._truth(node.condition)
        if condition.const is not None and node.constexpr:
            chosen = node.then if condition.const else node.other
            if chosen is not None:
                self._nested_of("{", chosen, "}")
            return
        head = f"if ({condition.text}) {{"
        if self._whole_block(node):
            if condition.varying:
                self._masked_if(condition, node)
                return
            head = f"if ({self._decided(condition, node.condition)}) {{"
        with self._under(condition.varying, node.line, True):
            self._nested_of(head, node.then, "}")
            if node.other is not None:
                self._nested_of("else {", node.other, "}")

    def _masked_if(self, condition: Value, node: If) -> None:
        """Some threads go one way and exchange values there."""
        outer = self._mask, self._first
        asked = self.kept("w_b1", condition.text, 1)
        for branch, sign in ((node.then, ""), (node.other, "!")):
            if branch is None:
                continue
            self.boundary()
            mask, first, threads = self._fresh("mask"), self._fresh("first"), self.whole.threads
            self._kept("w_b1", 1, mask)
            self._hoisted.append(f"  w_u32 {first};")
            self.line(f"for (w_u32 k = 0u; k < {threads}u; k++) {mask}[k] = 0;")
            self._say(f"{mask}[w_t] = {sign}{asked}[w_t];")
            self.boundary()
            self.line(f"for ({first} = 0u; {first} < {threads}u && !{mask}[{first}]; {first}++) ;")
            self.line(f"if ({first} < {threads}u) {{")
            self._mask, self._first = mask, first
            self.line(f"  w_t = {first};")
            with self._under(True, node.line, True):
                self._nested(branch)
            self.boundary()
            self._mask, self._first = outer
            self.line("}")
            self.line(f"w_t = {self._first};")

    def _decided(self, condition: Value, node: Node) -> str:
        """A condition on which all threads agree, as the block's."""
        if not _acts(node):
            self.boundary()
            return condition.text
        name = self.kept("w_b1", condition.text, 1)
        self.boundary()
        return f"{name}[{self._first}]"

    def _loop_of_block(self, node: Loop) -> None:
        """A loop around barriers."""
        self._scopes.append({})
        if node.init is not None:
            self._statement(node.init)
        self.boundary()
        self._jumps += 1
        self._continues[id(node)] = label = f"w_turn_{self._jumps}"
        before, self.free = self.free, 0
        self.line("for (;;) {")
        self._indent += 1
        self._loops.append(node)
        known = None if node.condition is None else self._truth(node.condition)
        divergent = (known is not None and known.varying) or id(node) in self._facts.divergent
        with self._under(divergent, node.line):
            if not node.first:
                self._ask(known, node)
            self._nested(node.body)
            self.boundary()
            self.line(f"{label}: ;")
            if node.first:
                self._ask(None if node.condition is None else self._truth(node.condition), node)
            elif node.step is not None:
                text = self._effect(node.step)
                if text:
                    self._say(text + ";")
                self.boundary()
        self._loops.pop()
        self._indent -= 1
        self.line("}")
        self.free += before
        self._scopes.pop()

    def _ask(self, condition: Value | None, node: Loop) -> None:
        asked = "w_go(w_status)"
        if condition is not None and node.condition is not None:
            asked = f"({self._decided(condition, node.condition)}) && {asked}"
        self.boundary()
        self.line(f"if (!({asked})) break;")

    def _loop(self, node: Loop) -> None:
        self._scopes.append({})
        self._say("{")
        self._indent += 1
        turns = self._turns(node)
        if node.init is not None:
            self._statement(node.init)
        before = self.free
        self.free = 0
        text, varying = "1", False
        # the body's text must not come before the condition's: what is learned of variables is the same in any order
        condition = None if node.condition is None else self._truth(node.condition)
        if condition is not None:
            text, varying = condition.text, condition.varying
        divergent = varying or id(node) in self._facts.divergent
        mark = len(self._lines)
        self._loops.append(node)
        with self._under(divergent, node.line):
            if node.first:
                self._nested(node.body)
                condition = self._truth(node.condition) if node.condition is not None else None
                text = condition.text if condition is not None else "1"
                step = ""
            else:
                self._nested(node.body)
                step = "" if node.step is None else self._effect(node.step)
        self._loops.pop()
        body, self._lines = self._lines[mark:], self._lines[:mark]
        work = max(turns, 1) * max(self.free, 1)
        if turns and before + work <= FREE:
            self.free = before + work
            asked = text
        else:
            self.free = before + self.free
            asked = "w_go(w_status)" if text == "1" else f"({text}) && w_go(w_status)"
        if node.first:
            self._say("do {")
            self._lines += body
            self._say(f"}} while ({asked});")
        else:
            self._say(f"for (; {asked}; {step}) {{")
            self._lines += body
            self._say("}")
        self._indent -= 1
        self._say("}")
        self._scopes.pop()

    def _turns(self, node: Loop) -> int:
        """How often a loop runs at most, where that is plain to see; 0 where it is not."""
        init, condition, step = node.init, node.condition, node.step
        if not (isinstance(init, Declare) and init.init is not None and isinstance(condition, Binary)):
            return 0
        if not (isinstance(condition.left, Name) and condition.left.name == init.name):
            return 0
        by = 0
        if isinstance(step, Unary) and step.op in ("++", "p++", "--", "p--"):
            by, on = (1 if "+" in step.op else -1), step.on
        elif isinstance(step, Assign) and step.op in ("+", "-"):
            known = self.types.maybe_constant(step.value, self.bound)
            by, on = (int(known[1]) if known and not known[0].real else 0) * (1 if step.op == "+" else -1), step.to
        else:
            return 0
        first = self.types.maybe_constant(init.init, self.bound)
        last = self.types.maybe_constant(condition.right, self.bound)
        if not (isinstance(on, Name) and on.name == init.name and first and last and by):
            return 0
        kind = init.type
        if first[0].real or last[0].real or kind not in (Named("i32"), Named("i64"), Named("u32"), Named("u64")):
            return 0
        distance = {
            "<": last[1] - first[1],
            "<=": last[1] - first[1] + 1,
            ">": first[1] - last[1],
            ">=": first[1] - last[1] + 1,
        }
        n = distance.get(condition.op, 0)
        if (
            (condition.op in ("<", "<=")) != (by > 0)
            or n < 0
            or (isinstance(kind, Named) and kind.name[0] == "u" and by < 0)
        ):
            return 0
        turns = -(-int(n) // abs(by))
        if turns > FREE_TURNS or max(abs(first[1]), abs(last[1])) > 1 << 30 or _changes(node.body, init.name):
            return 0
        return max(turns, 1)

    def _leave(self, node: Leave) -> None:
        loops = [x for x in self._loops if node.how == "break" or isinstance(x, Loop)]
        if not loops:
            raise CudaSourceError(f"{node.how} outside of a loop", node.line)
        if self._control:
            for loop in reversed(self._loops):
                self._facts.divergent.add(id(loop))
                if loop is loops[-1]:
                    break
        loop = loops[-1]
        if self._group and not self._control and id(loop) in self._facts.barriers:
            # the block leaves, so what is around this is the block's
            at = self._around.index(loop)
            self._facts.barriers.update(id(x) for x in self._around[at:])
            if any(isinstance(x, Switch) for x in self._around[at:]):
                self.complaint = CudaSourceError(f"{node.how} inside of a switch, around a barrier: use if", node.line)
            self.boundary()
            self.line(f"{node.how};" if node.how == "break" else f"goto {self._continues.get(id(loop), 'w_turn')};")
            return
        self._say(f"{node.how};")

    def _switch(self, node: Switch) -> None:
        on = self.value(node.on)
        if not isinstance(on.type, Scalar) or on.type.real:
            raise CudaSourceError("switch needs an integer", node.line)
        kind = promoted(on.type)
        self._say(f"switch ({self.converted(on, kind, node.line).text}) {{")
        self._indent += 1
        self._loops.append(node)
        self._scopes.append({})
        with self._under(on.varying or id(node) in self._facts.divergent, node.line):
            for labels, body in node.cases:
                for label in labels:
                    if label is None:
                        self._say("default:")
                    else:
                        known = self.types.typed_constant(label, self.bound)
                        self._say(f"case {literal(kind, wrapped(known[1], kind))}:")
                self._say("{")
                self._nested(Block(node.line, body))
                self._say("}")
        self._scopes.pop()
        self._loops.pop()
        self._indent -= 1
        self._say("}")

    def _return(self, node: Return) -> None:
        kind = self.result_type()
        if self._control:
            self._left = self._left or node.line
            for loop in self._loops:
                self._facts.divergent.add(id(loop))
        elif self._group:
            # the block returns, so what is around this is the block's
            self._facts.barriers.update(id(x) for x in self._around)
            if any(isinstance(x, Switch) for x in self._around):
                self.complaint = CudaSourceError("return inside of a switch, around a barrier: use if", node.line)
        if node.value is None:
            if not isinstance(kind, Void):
                raise CudaSourceError(f"{self._function.name} must give {kind}", node.line)
            self._leave_function()
            return
        if isinstance(node.value, Braces):
            value = self._built(kind, node.value, node.line)
        else:
            value = self.value(node.value)
        if value.varying or self._control:
            self._facts.result_varying = True
        written = self._function.result
        if isinstance(written, Named) and written.name == "auto" and self._facts.result is None:
            self._facts.result = value.type
            kind = value.type
        if isinstance(written, PointerTo) and isinstance(value.type, Pointer):
            if isinstance(kind, Pointer) and kind.space != "?" and value.type.space not in ("?", kind.space):
                raise CudaSourceError("a function that gives pointers into different memories", node.line)
            if value.type.space != "?":
                target = self.types.of(written, self.bound, node.line)
                assert isinstance(target, Pointer)
                kind = self._facts.result = Pointer(target.to, value.type.space, target.const)
            self._facts.result_root = _root(self._facts.result_root, value.root)
        if isinstance(kind, Void):
            if not isinstance(value.type, Void):
                raise CudaSourceError(f"{self._function.name} gives nothing", node.line)
            self._say(f"{value.text or '(void)0'};")
            self._leave_function()
            return
        text = self.converted(value, kind, node.line).text
        if self._group:
            self._say(f"w_result[w_t] = {text};")
            self._leave_function()
        else:
            self._say(f"return {text};")

    def _leave_function(self) -> None:
        """One thread has nothing more to do here, or the block."""
        if not self._group:
            self._say("return;")
        elif self._control:
            self._say(f"{{ w_left[w_t] = 1; goto {self._label}; }}")
        else:
            self.boundary()
            self.line("return;")

    # -- declarations --------------------------------------------------------------------------------------------------

    def _variable(self, node: Declare) -> None:
        if node.shared:
            self._shared(node)
            return
        if node.extern or node.constant:
            raise CudaSourceError(f"{node.name}: this is not understood inside a function", node.line)
        written, key = node.type, id(node)
        if isinstance(written, ReferenceTo):
            self._reference(node, written)
            return
        const = node.constexpr or (isinstance(written, Named) and written.const)
        if isinstance(written, ArrayOf):
            self._array(node, written)
            return
        init = node.init
        value: Value | None = None
        if isinstance(written, Named) and written.name == "auto":
            if init is None or isinstance(init, Braces):
                raise CudaSourceError(f"{node.name}: auto needs a value", node.line)
            value = self.value(init)
            kind = value.type
        else:
            kind = self.types.of(written, self.bound, node.line)
            if isinstance(init, Braces):
                value = self._built(kind, init, node.line)
            elif init is not None:
                value = self.value(init)
        if isinstance(kind, Void):
            raise CudaSourceError(f"{node.name} is void", node.line)
        root = ""
        if isinstance(kind, Pointer):
            space = value.type.space if value is not None and isinstance(value.type, Pointer) else "?"
            if space == "?":
                space = self._facts.spaces.get(key, "?")
            kind = Pointer(kind.to, space, kind.const)
            root = self._facts.roots.get(key, value.root if value is not None else "")
        name = self._fresh(node.name)
        lasting = self._group and self._nest == 0
        space = "l" if lasting else "p"
        held = Value(f"{name}[w_t]" if lasting else name, kind, None, "var", space, False, root, const)
        variable = Variable(key, held)
        held.variable = variable
        held.varying = key in self._facts.varying
        if value is not None:
            value = self.converted(value, kind, node.line)
            if value.varying or self._control:
                self._mark(variable)
            if const and value.const is not None and isinstance(kind, Scalar):
                held.const = value.const
                self.bound.numbers[node.name] = (kind, value.const)
        elif node.constexpr:
            raise CudaSourceError(f"{node.name}: a constant needs a value", node.line)
        if held.const is None:
            self.bound.numbers.pop(node.name, None)
        self.private += kind.size
        if lasting:
            zero = self._zero(kind)
            start = value.text if value is not None else f"({kind.text}){zero}" if zero[0] == "{" else zero
            self._say(f"{self._kept(kind.text, held_size(kind), name)} = {start};")
        else:
            self._say(f"{kind.text} {name} = {self._zero(kind) if value is None else value.text};")
        self._declare(node.name, variable, node.line)

    def _zero(self, kind: Type) -> str:
        if isinstance(kind, Pointer):
            return f"w_null_{'g' if kind.space == '?' else kind.space}()"
        return "{0}" if isinstance(kind, Vector | Struct | Array) else "0"

    def _reference(self, node: Declare, written: ReferenceTo) -> None:
        if node.init is None or isinstance(node.init, Braces):
            raise CudaSourceError(f"{node.name}: a reference needs what it refers to", node.line)
        to = self.memory(self.expression(node.init), node.line)
        if not (isinstance(written.to, Named) and written.to.name == "auto"):
            kind = self.types.of(written.to, self.bound, node.line)
            if kind != to.type:
                raise CudaSourceError(f"{node.name} refers to {kind}, and is given {to.type}", node.line)
        name = self._fresh(node.name)
        const = isinstance(written.to, Named) and written.to.const
        if self._group and self._nest == 0:
            text = self._kept(f"w_{to.space}p", POINTER, name)
            self._say(f"{text} = {to.text};")
            name = text
        else:
            self._say(f"w_{to.space}p {name} = {to.text};")
        varying = to.varying or id(node) in self._facts.varying
        held = Value(name, to.type, None, "mem", to.space, varying, to.root, const or to.readonly, to.variable)
        self._declare(node.name, Variable(id(node), held, True), node.line)

    def _array(self, node: Declare, written: ArrayOf) -> None:
        init = node.init
        if written.count is None and isinstance(init, Braces):
            written = ArrayOf(written.of, Number(node.line, str(len(init.items)), len(init.items), "i32"))
        kind = self.types.of(written, self.bound, node.line)
        assert isinstance(kind, Array)
        element: Type = kind
        while isinstance(element, Array):
            element = element.of
        name = self._fresh(node.name)
        self.private += kind.size
        n = kind.size // element.size
        items: list[str] = []
        if isinstance(init, Braces):
            items = self._flat(init, kind, node.line)
        elif init is not None:
            raise CudaSourceError(f"{node.name}: an array begins with {{ }}", node.line)
        zero = self._zero(element)
        if self._group and self._nest == 0:
            self._kept(element.text, element.size, name, n)
            zero = f"({element.text}){zero}" if zero[0] == "{" else zero
            self._say(f"for (w_u32 k = 0u; k < {n}u; k++) {name}[w_t * {n}u + k] = {zero};")
            for k, item in enumerate(items):
                if item != "0":
                    self._say(f"{name}[w_t * {n}u + {k}u] = {item};")
            name = f"({name} + w_t * {n}u)"
        elif items and any(x != "0" for x in items):
            self._say(f"{element.text} {name}[{n}] = {{{', '.join(items)}}};")
        else:
            self._say(f"{element.text} {name}[{n}] = {{{zero}}};")
        const = _readonly(written)
        space = "l" if self._group and self._nest == 0 else "p"
        pointer = f"w_mk_{space}(({self.dialect.spaces[space]} w_u8 *){name}, {kind.size})"
        held = Value(pointer, kind, None, "mem", space, space == "l", f"the array {node.name}", const)
        variable = Variable(id(node), held)
        held.variable = variable
        self._declare(node.name, variable, node.line)

    def _flat(self, braces: Braces, kind: Type, line: int) -> list[str]:
        """Values of an array's elements, with zeros for those left out."""
        if not isinstance(kind, Array):
            if len(braces.items) != 1 or not isinstance(kind, Scalar):
                return [self._built(kind, braces, line).text]
            return [self.converted(self.value(braces.items[0]), kind, line).text]
        element: Type = kind
        while isinstance(element, Array):
            element = element.of
        out: list[str] = []
        for item in braces.items:
            if isinstance(item, Braces):
                out += self._flat(item, kind.of, line)
            elif isinstance(kind.of, Array):
                raise CudaSourceError("rows of an array are in braces of their own", line)
            else:
                value = self.value(item)
                out.append(self.converted(value, kind.of, line).text)
        n = kind.size // element.size
        if len(out) > n:
            raise CudaSourceError(f"{len(out)} values for {n} elements", line)
        if isinstance(element, Scalar):
            return out + ["0"] * (n - len(out))
        return out

    def _shared(self, node: Declare) -> None:
        if not self._function.kernel and node.extern is False:
            pass  # a device function's shared array is the block's, as in CUDA
        written = node.type
        if node.init is not None:
            raise CudaSourceError(f"{node.name}: shared memory begins with zeros, not with values", node.line)
        if node.extern:
            if not (isinstance(written, ArrayOf) and written.count is None):
                raise CudaSourceError(f"{node.name}: an extern __shared__ array has no size here", node.line)
            held = self.whole.dynamic_shared(self.types.of(written.of, self.bound, node.line), node.name)
        else:
            kind = self.types.of(written, self.bound, node.line)
            held = self.whole.static_shared((id(node), self._instance.name), kind, node.name, node.line)
        held.variable = Variable(id(node), held)
        self._declare(node.name, held.variable, node.line)

    # -- lookups -------------------------------------------------------------------------------------------------------

    def _lookup(self, node: Name) -> Value:
        for scope in reversed(self._scopes):
            variable = scope.get(node.name)
            if variable is not None:
                held = variable.value
                return Value(
                    held.text, held.type, held.const, held.place, held.space,
                    held.varying or variable.key in self._facts.varying, held.root, held.readonly,
                    held.variable or variable,
                )  # fmt: skip
        number = self.bound.numbers.get(node.name)
        if number is not None:
            return Value(literal(*number), number[0], number[1])
        found = self.whole.name(node.name)
        if found is not None:
            return found
        if node.name in ("NULL", "nullptr"):
            return Value("w_null_g()", Pointer(VOID, "?"))
        if node.name in builtins.NUMBERS:
            kind, text = builtins.NUMBERS[node.name]
            value: float | int = float(text) if kind[0] == "f" else int(text)
            return Value(literal(Scalar(kind), value), Scalar(kind), value)
        if node.name in builtins.PLACES:
            parts = ", ".join(f"(w_u32)({self.whole.where(builtins.PLACES[node.name], k)})" for k in range(3))
            make = self.whole.maker(Vector(U32, 3))
            return Value(f"{make}({parts})", Vector(U32, 3), None, "", "", node.name == "threadIdx")
        if node.name in self.whole.unit.functions:
            raise CudaSourceError(f"{node.name} is a function: pointers to functions are not understood", node.line)
        raise CudaSourceError(f"{node.name} is not declared", node.line)

    # -- expressions ---------------------------------------------------------------------------------------------------

    def value(self, node: Node) -> Value:
        """An expression's value."""
        return self.loaded(self.expression(node), node.line)

    def loaded(self, value: Value, line: int) -> Value:
        """What is at a place."""
        if value.place != "mem":
            if value.const is not None and isinstance(value.type, Scalar):
                text = literal(value.type, value.const)
                return Value(text, value.type, value.const)
            return Value(value.text, value.type, value.const, "", "", value.varying, value.root)
        if isinstance(value.type, Array):
            return Value(
                value.text, Pointer(value.type.of, value.space, value.readonly), None, "", "", value.varying, value.root
            )
        if isinstance(value.type, Void):
            raise CudaSourceError("nothing is known of what a void pointer points to", line)
        load = self.helpers.load(value.space, value.type)
        place = self.whole.place(line, value.root)
        varying = value.varying or value.space == "p"
        return Value(f"{load}({PASS}, {value.text}, {place})", value.type, None, "", "", varying)

    def _truth(self, node: Node) -> Value:
        return self.as_truth(self.value(node), node.line)

    def as_truth(self, value: Value, line: int) -> Value:
        if isinstance(value.type, Pointer):
            return Value(f"({value.text}.n != 0)", B1, None, "", "", value.varying)
        if not isinstance(value.type, Scalar):
            raise CudaSourceError(f"{value.type} is neither true nor false", line)
        if value.type == B1:
            return value
        const = None if value.const is None else int(bool(value.const))
        return Value(f"({value.text} != 0)", B1, const, "", "", value.varying)

    def converted(self, value: Value, kind: Type, line: int) -> Value:
        """A value in another type, by C's rules for assignments."""
        if value.type == kind:
            return value
        if isinstance(kind, Scalar) and isinstance(value.type, Scalar):
            return self._number(value, kind)
        if isinstance(kind, Pointer):
            return self._pointer(value, kind, line)
        if isinstance(value.type, Pointer):
            raise CudaSourceError(f"a pointer is not made {kind}: its address is nobody's business", line)
        raise CudaSourceError(f"{value.type} is not made {kind}", line)

    def _number(self, value: Value, kind: Scalar) -> Value:
        source = value.type
        assert isinstance(source, Scalar)
        if value.const is not None:
            const = wrapped(value.const, kind)
            if kind.real and not source.real:
                return Value(f"(({kind.text}){literal(source, value.const)})", kind, const)
            if not kind.real or source.real:
                text = literal(kind, const) if not kind.real else f"(({kind.text}){value.text})"
                return Value(text, kind, const)
        if kind == B1:
            text = f"((w_b1)({value.text} != 0))"
        elif source.real and not kind.real:
            through = kind if kind.size >= 4 else I32
            text = f"w_{source.name}_to_{through.name}({value.text})"
            if through != kind:
                text = f"(({kind.text}){text})"
        else:
            text = f"(({kind.text})({value.text}))"
        return Value(text, kind, None, "", "", value.varying)

    def _pointer(self, value: Value, kind: Pointer, line: int) -> Value:
        source = value.type
        if not isinstance(source, Pointer):
            if value.const == 0:
                space = "g" if kind.space == "?" else kind.space
                return Value(f"w_null_{space}()", Pointer(kind.to, kind.space, kind.const))
            raise CudaSourceError(f"{source} is not made a pointer: nothing is known of its bounds", line)
        if source.space == "?":
            return Value(f"w_null_{'g' if kind.space == '?' else kind.space}()", kind)
        if kind.space not in ("?", source.space):
            raise CudaSourceError("a pointer that points now into one memory, now into another", line)
        if source.const and not kind.const:
            raise CudaSourceError("a pointer to what is const is made one to what is not", line)
        if source.to != kind.to and not isinstance(kind.to, Void):
            raise CudaSourceError(f"{source} is not made {kind} without a cast", line)
        return Value(value.text, Pointer(kind.to, source.space, kind.const), None, "", "", value.varying, value.root)

    def memory(self, value: Value, line: int) -> Value:
        """An object as one in memory; variables get an address."""
        if value.place == "mem":
            return value
        if value.place != "var" or isinstance(value.type, Pointer):
            raise CudaSourceError("this has no address", line)
        self._mark(value.variable)
        space = value.space or "p"
        text = f"w_mk_{space}(({self.dialect.spaces[space]} w_u8 *)&{value.text}, {value.type.size})"
        return Value(text, value.type, None, "mem", space, True, "a variable", value.readonly, value.variable)

    def expression(self, node: Node) -> Value:
        self._count()
        match node:
            case Number(value=value, kind=kind):
                scalar = Scalar(kind)
                # the digits of a real number are its own
                text = node.text + ("f" if kind == "f32" else "") if scalar.real else literal(scalar, value)
                if scalar.real and "." not in node.text and "e" not in node.text.lower():
                    text = node.text + "." + ("0f" if kind == "f32" else "0")
                return Value(text, scalar, value)
            case Name():
                return self._lookup(node)
            case Unary():
                return self._unary(node)
            case Binary():
                return self._binary(node)
            case Assign():
                return self._assign(node)
            case Conditional():
                return self._conditional(node)
            case Call():
                from wooly_compiler.cudac.calls import call

                return call(self, node)
            case Index():
                return self._index(node)
            case Member():
                return self._member(node)
            case Cast():
                return self._cast(node)
            case SizeOf(of=of):
                kind_of = self.expression(of).type if isinstance(of, Node) else self.types.of(of, self.bound, node.line)
                return Value(literal(U64, kind_of.size), U64, kind_of.size)
        raise CudaSourceError("this expression is not understood", node.line)

    def _unary(self, node: Unary) -> Value:
        line = node.line
        if node.op in ("++", "--", "p++", "p--"):
            one = Number(line, "1", 1, "i32")
            return self._update(self.expression(node.on), node.op[-1], self.value(one), line, node.op[0] == "p")
        if node.op == "*":
            return self._at(self.value(node.on), None, line)
        if node.op == "&":
            value = self.memory(self.expression(node.on), line)
            return Value(
                value.text, Pointer(value.type, value.space, value.readonly), None, "", "", value.varying, value.root
            )
        value = self.value(node.on)
        if node.op == "!":
            truth = self.as_truth(value, line)
            const = None if truth.const is None else int(not truth.const)
            return Value(f"(!{truth.text})", B1, const, "", "", truth.varying)
        if not isinstance(value.type, Scalar) or (node.op == "~" and value.type.real):
            raise CudaSourceError(f"{node.op} of {value.type}", line)
        kind = promoted(value.type)
        value = self._number(value, kind) if kind != value.type else value
        folded = folded_unary(node.op, None if value.const is None else (kind, value.const))
        if folded is not None and not kind.real:
            return Value(literal(kind, folded[1]), kind, folded[1])
        if node.op == "-" and kind.signed:
            unsigned = kind.text.replace("w_i", "w_u")
            text = f"(({kind.text})(({unsigned})0 - ({unsigned})({value.text})))"
        else:
            text = f"({node.op}({value.text}))"
        return Value(text, kind, None if folded is None else folded[1], "", "", value.varying)

    def _binary(self, node: Binary) -> Value:
        line = node.line
        if node.op == ",":
            left, right = self._effect(node.left) or "(void)0", self.value(node.right)
            return Value(f"({left}, {right.text})", right.type, None, "", "", right.varying, right.root)
        if node.op in ("&&", "||"):
            a = self._truth(node.left)
            with self._perhaps(a.varying, line):
                b = self._truth(node.right)
            folded = folded_binary(node.op, *[None if x.const is None else (B1, x.const) for x in (a, b)])
            if folded is None and a.const is not None and bool(a.const) == (node.op == "||"):
                folded = B1, a.const
            const = None if folded is None else folded[1]
            return Value(f"({a.text} {node.op} {b.text})", B1, const, "", "", a.varying or b.varying)
        return self.operate(node.op, self.value(node.left), self.value(node.right), line)

    def operate(self, op: str, a: Value, b: Value, line: int) -> Value:
        """A binary operator on two values."""
        varying = a.varying or b.varying
        if isinstance(a.type, Pointer) or isinstance(b.type, Pointer):
            return self._pointers(op, a, b, line)
        if not (isinstance(a.type, Scalar) and isinstance(b.type, Scalar)):
            raise CudaSourceError(f"{op} between {a.type} and {b.type}: write it for every part", line)
        kind = promoted(a.type) if op in ("<<", ">>") else common(a.type, b.type)
        if kind.real and op in ("%", "<<", ">>", "&", "|", "^"):
            raise CudaSourceError(f"{op} of {kind}", line)
        known = folded_binary(
            op,
            None if a.const is None else (a.type, a.const),
            None if b.const is None else (b.type, b.const),
        )
        if known is not None:
            return Value(literal(*known), known[0], known[1])
        x = self._number(a, kind) if a.type != kind else a
        y = self._number(b, kind) if b.type != kind and op not in ("<<", ">>") else b
        if op in _ASKS:
            return Value(f"({x.text} {op} {y.text})", B1, None, "", "", varying)
        return Value(operation(op, kind, x.text, y.text, y.const), kind, None, "", "", varying)

    def _pointers(self, op: str, a: Value, b: Value, line: int) -> Value:
        varying = a.varying or b.varying
        if op in ("+", "-") and isinstance(a.type, Pointer) and isinstance(b.type, Scalar):
            return self._moved(a, b, op == "-", line)
        if op == "+" and isinstance(b.type, Pointer) and isinstance(a.type, Scalar):
            return self._moved(b, a, False, line)
        if isinstance(a.type, Pointer) and isinstance(b.type, Pointer):
            null = "?" in (a.type.space, b.type.space)
            if op in _ASKS and null:
                one = a if b.type.space == "?" else b
                if op in ("==", "!="):
                    return Value(f"({one.text}.n {op} 0)", B1, None, "", "", varying)
            elif a.type.space == b.type.space and (op in _ASKS or (op == "-" and a.type.to == b.type.to)):
                x, y = (f"w_where_{a.type.space}({p.text})" for p in (a, b))
                if op in _ASKS:
                    return Value(f"({x} {op} {y})", B1, None, "", "", varying)
                return Value(f"((w_i64)({x} - {y}) / {a.type.to.size})", Scalar("i64"), None, "", "", varying)
        if isinstance(b.type, Scalar) and b.const == 0 and op in ("==", "!="):
            return Value(f"({a.text}.n {op} 0)", B1, None, "", "", varying)
        raise CudaSourceError(f"{op} between {a.type} and {b.type}", line)

    def _moved(self, pointer: Value, by: Value, back: bool, line: int) -> Value:
        kind = pointer.type
        assert isinstance(kind, Pointer)
        assert isinstance(by.type, Scalar)
        if by.type.real:
            raise CudaSourceError("a pointer moves by whole elements", line)
        if isinstance(kind.to, Void):
            raise CudaSourceError("a void pointer does not move: cast it", line)
        # a signed number is made wide with its sign, an unsigned one without
        wide = f"(w_u64)(w_i64)({by.text})" if by.type.signed else f"(w_u64)({by.text})"
        sign = "(w_u64)0 - " if back else ""
        space = "g" if kind.space == "?" else kind.space
        text = f"w_by_{space}({pointer.text}, {sign}{wide} * {kind.to.size}u)"
        return Value(text, kind, None, "", "", pointer.varying or by.varying, pointer.root)

    def _at(self, pointer: Value, index: Value | None, line: int) -> Value:
        """The object that a pointer points to."""
        if not isinstance(pointer.type, Pointer):
            raise CudaSourceError(f"{pointer.type} is no pointer", line)
        if index is not None:
            pointer = self._moved(pointer, index, False, line)
        kind = pointer.type
        assert isinstance(kind, Pointer)
        if isinstance(kind.to, Void):
            raise CudaSourceError("nothing is known of what a void pointer points to: cast it", line)
        space = "g" if kind.space == "?" else kind.space
        return Value(
            pointer.text, kind.to, None, "mem", space, pointer.varying, pointer.root or "a null pointer", kind.const
        )

    def _index(self, node: Index) -> Value:
        on = self.expression(node.on)
        index = self.value(node.index)
        if not isinstance(index.type, Scalar) or index.type.real:
            raise CudaSourceError("an index is a whole number", node.line)
        if on.place == "mem" and isinstance(on.type, Array):
            on, variable = self.loaded(on, node.line), on.variable
        else:
            on, variable = self.loaded(on, node.line), None
        found = self._at(on, index, node.line)
        found.variable = variable
        return found

    def _member(self, node: Member) -> Value:
        if isinstance(node.on, Name) and node.on.name in builtins.PLACES and not self._declared(node.on.name):
            if node.arrow or node.name not in ("x", "y", "z"):
                raise CudaSourceError(f"{node.on.name} has x, y and z", node.line)
            k = "xyz".index(node.name)
            word = self.whole.where(builtins.PLACES[node.on.name], k)
            known = self.whole.block[k] if node.on.name == "blockDim" else None
            if known is not None:
                return Value(literal(U32, known), U32, known)
            varying = node.on.name == "threadIdx" and self.whole.block[k] != 1
            return Value(f"((w_u32){word})", U32, None, "", "", varying)
        on = self.expression(node.on)
        if node.arrow:
            on = self._at(self.loaded(on, node.line), None, node.line)
        offset, kind, text = _field(on.type, node.name, node.line)
        if on.place == "mem":
            found = Value(
                f"w_in_{on.space}({on.text}, {on.type.size}u, {offset}u, {kind.size}u)",
                kind,
                None,
                "mem",
                on.space,
                on.varying,
                on.root,
                on.readonly,
            )
            found.variable = on.variable
            return found
        if isinstance(kind, Array):
            if on.place != "var":
                raise CudaSourceError("an array of what is no variable", node.line)
            self._mark(on.variable)
            space = on.space or "p"
            pointer = f"w_mk_{space}(({self.dialect.spaces[space]} w_u8 *){on.text}.{text}, {kind.size})"
            root = f"the field {node.name}"
            return Value(pointer, kind, None, "mem", space, True, root, on.readonly, on.variable)
        return Value(f"{on.text}.{text}", kind, None, on.place, on.space, on.varying, "", on.readonly, on.variable)

    def _declared(self, name: str) -> bool:
        return any(name in scope for scope in self._scopes)

    def _conditional(self, node: Conditional) -> Value:
        condition = self._truth(node.condition)
        with self._perhaps(condition.varying, node.line):
            a, b = self.value(node.then), self.value(node.other)
        varying = condition.varying or a.varying or b.varying
        if condition.const is not None:
            chosen = a if condition.const else b
            if isinstance(a.type, Scalar) and isinstance(b.type, Scalar):
                return self._number(chosen, a.type if a.type == b.type else common(a.type, b.type))
        kind: Type
        if isinstance(a.type, Scalar) and isinstance(b.type, Scalar):
            kind = a.type if a.type == b.type else common(a.type, b.type)
        elif isinstance(a.type, Pointer) and isinstance(b.type, Pointer):
            kind = b.type if a.type.space == "?" else a.type
            if a.type.const or b.type.const:
                assert isinstance(kind, Pointer)
                kind = Pointer(kind.to, kind.space, True)
        else:
            kind = a.type
        x, y = self.converted(a, kind, node.line), self.converted(b, kind, node.line)
        root = _root(a.root, b.root)
        return Value(f"({condition.text} ? {x.text} : {y.text})", kind, None, "", "", varying, root)

    def _cast(self, node: Cast) -> Value:
        line = node.line
        to = node.to
        if isinstance(to, ReferenceTo):
            raise CudaSourceError("casts to references are not understood", line)
        kind = self.types.of(to, self.bound, line)
        if node.on is None:
            return Value(
                f"(({kind.text}){self._zero(kind)})" if isinstance(kind, Scalar) else self.built(kind, []),
                kind,
                0 if isinstance(kind, Scalar) else None,
            )
        if isinstance(node.on, Braces):
            return self._built(kind, node.on, line)
        value = self.value(node.on)
        if isinstance(kind, Void):
            return Value(f"((void)({value.text}))", VOID)
        if isinstance(kind, Pointer):
            return self._cast_pointer(value, kind, node)
        if node.how == "reinterpret_cast":
            raise CudaSourceError("reinterpret_cast is for pointers: use __float_as_int and kin for bits", line)
        return self.converted(value, kind, line)

    def _cast_pointer(self, value: Value, kind: Pointer, node: Cast) -> Value:
        line = node.line
        source = value.type
        if not isinstance(source, Pointer):
            if value.const == 0:
                return Value("w_null_g()", Pointer(kind.to, "?", kind.const))
            raise CudaSourceError(f"{source} is cast to a pointer: nothing is known of its bounds", line)
        if source.space == "?":
            return Value("w_null_g()", kind)
        if source.const and not kind.const:
            # what a launch only reads it must not write by another name
            kind = Pointer(kind.to, kind.space, True)
        to, space = kind.to, source.space
        text = value.text
        if to != source.to and not isinstance(to, Void):
            text = f"w_as_{space}({text}, {to.size}u, {to.align}u)"
        return Value(text, Pointer(to, space, kind.const), None, "", "", value.varying, value.root)

    def built(self, kind: Type, parts: Sequence[str]) -> str:
        """The text that makes a vector or a struct."""
        return f"{self.whole.maker(kind)}({', '.join(parts)})"

    def _built(self, kind: Type, braces: Braces, line: int) -> Value:
        if isinstance(kind, Scalar):
            if len(braces.items) > 1:
                raise CudaSourceError(f"{len(braces.items)} values for {kind}", line)
            if not braces.items:
                return Value(literal(kind, 0), kind, 0)
            return self.converted(self.value(braces.items[0]), kind, line)
        if isinstance(kind, Vector):
            fields: list[Type] = [kind.of] * kind.n
        elif isinstance(kind, Struct) and not any(isinstance(t, Array) for _, t, _ in kind.fields):
            fields = [t for _, t, _ in kind.fields]
        else:
            raise CudaSourceError(f"{kind} is not made from values", line)
        if len(braces.items) > len(fields):
            raise CudaSourceError(f"{len(braces.items)} values for {kind}", line)
        values = []
        for item, field_kind in zip(braces.items, fields, strict=False):
            if isinstance(item, Braces):
                values.append(self._built(field_kind, item, line))
            else:
                values.append(self.converted(self.value(item), field_kind, line))
        for field_kind in fields[len(values) :]:
            values.append(self._built(field_kind, Braces(line, []), line))
        text = self.built(kind, [v.text for v in values])
        return Value(text, kind, None, "", "", any(v.varying for v in values))

    # -- assignments ---------------------------------------------------------------------------------------------------

    def _assign(self, node: Assign) -> Value:
        to = self.expression(node.to)
        if isinstance(node.value, Braces):
            value = self._built(to.type, node.value, node.line)
        else:
            value = self.value(node.value)
        if node.op:
            return self._update(to, node.op, value, node.line, False)
        return self._stored(to, value, node.line)

    def _writable(self, to: Value, line: int) -> None:
        if to.place not in ("var", "mem") or isinstance(to.type, Array):
            raise CudaSourceError("this cannot be assigned to", line)
        if to.readonly or to.space == "c":
            raise CudaSourceError(f"{to.root or 'this'} is const: it cannot be assigned to", line)

    def _learn(self, to: Value, varying: bool) -> None:
        if (varying or self._control) and to.place == "var":
            self._mark(to.variable)

    def _stored(self, to: Value, value: Value, line: int) -> Value:
        self._writable(to, line)
        self._learn(to, value.varying)
        if isinstance(to.type, Pointer) and to.variable is not None:
            self._learn_pointer(to, value, line)
        value = self.converted(value, to.type, line)
        if to.place == "var":
            return Value(f"({to.text} = {value.text})", to.type, None, "", "", value.varying, value.root)
        store = self.helpers.store(to.space, to.type)
        place = self.whole.place(line, to.root)
        self.whole.wrote(to.root)
        return Value(f"{store}({PASS}, {to.text}, {value.text}, {place})", to.type, None, "", "", value.varying)

    def _learn_pointer(self, to: Value, value: Value, line: int) -> None:
        variable, kind = to.variable, to.type
        assert variable is not None
        assert isinstance(kind, Pointer)
        if isinstance(value.type, Pointer) and value.type.space != "?":
            if kind.space == "?":
                self._facts.spaces.setdefault(variable.key, value.type.space)
                to.type = variable.value.type = Pointer(kind.to, value.type.space, kind.const)
            root = _root(self._facts.roots.get(variable.key, variable.value.root), value.root)
            self._facts.roots[variable.key] = variable.value.root = root

    def _update(self, to: Value, op: str, value: Value, line: int, before: bool) -> Value:
        """``op=``, ``++`` and ``--``."""
        self._writable(to, line)
        self._learn(to, value.varying)
        varying = to.varying or value.varying
        if to.place == "var":
            held = Value(to.text, to.type, None, "", "", varying, to.root)
            made = self.operate(op, held, value, line)
            made = self.converted(made, to.type, line)
            if not before:
                return Value(f"({to.text} = {made.text})", to.type, None, "", "", varying, to.root)
            # the value before, out of the one after: as all that is stepped back wraps, it is exact for integers and pointers
            if isinstance(to.type, Scalar) and (to.type.real or to.type == B1):
                raise CudaSourceError(f"{op}{op} behind {to.type} is not understood as a value", line)
            after = Value(f"({to.text} = {made.text})", to.type, None, "", "", varying, to.root)
            back = self.operate("-" if op == "+" else "+", after, value, line)
            return self.converted(back, to.type, line)
        kind = to.type
        if not isinstance(kind, Scalar) or not isinstance(value.type, Scalar):
            raise CudaSourceError(f"{op}= between {kind} and {value.type}", line)
        old = Value("old", kind)
        new = self._number(self.operate(op, old, Value("v", value.type), line), kind)
        update = self.helpers.update(to.space, kind, _WORDS[op], value.type, new.text, before)
        place = self.whole.place(line, to.root)
        self.whole.wrote(to.root)
        return Value(
            f"{update}({PASS}, {to.text}, {value.text}, {place})", kind, None, "", "", varying or to.space == "p"
        )


def held_size(kind: Type) -> int:
    """Bytes that a value takes where it is printed."""
    return POINTER if isinstance(kind, Pointer) else kind.size


def operation(op: str, kind: Scalar, x: str, y: str, known: float | int | None) -> str:
    """Arithmetic with defined results: signed numbers wrap, shifts keep to the width, a quotient by 0 is 0."""
    if kind.real:
        return f"({x} {op} {y})"
    if op in ("/", "%"):
        if known is not None and known not in (0, -1):
            return f"({x} {op} {y})"
        return f"w_{_WORDS[op]}_{kind.name}({x}, {y})"
    unsigned = kind.text.replace("w_i", "w_u")
    if op in ("<<", ">>"):
        by = f"((w_u32)({y}) & {kind.size * 8 - 1}u)"
        if op == "<<" and kind.signed:
            return f"(({kind.text})(({unsigned})({x}) << {by}))"
        return f"({x} {op} {by})"
    if op in ("&", "|", "^") or not kind.signed:
        return f"({x} {op} {y})"
    return f"(({kind.text})(({unsigned})({x}) {op} ({unsigned})({y})))"


def _acts(node: object) -> bool:
    """Whether an expression does more than give a value."""
    if isinstance(node, Assign | Call) or (isinstance(node, Unary) and node.op in ("++", "--", "p++", "p--")):
        return True
    if isinstance(node, Node):
        return any(_acts(getattr(node, f)) for c in type(node).__mro__ for f in getattr(c, "__slots__", ()))
    if isinstance(node, list | tuple):
        return any(_acts(x) for x in node)
    return False


def _root(a: str, b: str) -> str:
    if not a or a == b:
        return b
    return a if not b else "one of several arrays"


def _readonly(written: Written) -> bool:
    while isinstance(written, ArrayOf):
        written = written.of
    return isinstance(written, Named) and written.const


def _field(kind: Type, name: str, line: int) -> tuple[int, Type, str]:
    """Offset, type and printed name of a field."""
    if isinstance(kind, Vector):
        if name in "xyzw"[: kind.n] and len(name) == 1:
            k = "xyzw".index(name)
            return k * kind.of.size, kind.of, name
    elif isinstance(kind, Struct):
        for field, field_kind, offset in kind.fields:
            if field == name:
                return offset, field_kind, f"f_{name}"
    raise CudaSourceError(f"{kind} has no {name}", line)


def _changes(node: object, name: str) -> bool:
    """Whether a loop's variable may be changed in its body: assigned to, or handed on by its name."""
    if isinstance(node, Assign) and isinstance(node.to, Name) and node.to.name == name:
        return True
    if (
        isinstance(node, Unary)
        and node.op in ("++", "--", "p++", "p--", "&")
        and isinstance(node.on, Name)
        and node.on.name == name
    ):
        return True
    if isinstance(node, Call) and any(isinstance(a, Name) and a.name == name for a in node.args):
        return True
    if isinstance(node, Declare) and isinstance(node.type, ReferenceTo):
        return True
    if isinstance(node, Node):
        return any(_changes(getattr(node, f), name) for c in type(node).__mro__ for f in getattr(c, "__slots__", ()))
    if isinstance(node, list | tuple):
        return any(_changes(x, name) for x in node)
    return False
