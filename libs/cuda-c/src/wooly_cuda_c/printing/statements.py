"""Prints statements: conditions, loops and returns, for a thread or for a whole block."""

from __future__ import annotations

from wooly_cuda_c.printing import lockstep
from wooly_cuda_c.printing.arithmetic import (
    MAX_UNCHECKED_NODES,
    MAX_UNCHECKED_TURNS,
    contains,
    has_side_effects,
    joined_root,
    may_change,
)
from wooly_cuda_c.printing.context import FunctionContext
from wooly_cuda_c.printing.scope import literal
from wooly_cuda_c.printing.types import (
    Pointer,
    Scalar,
    Void,
    promoted,
    wrapped,
)
from wooly_cuda_c.printing.values import Linear, Value, Variable
from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.tree import (
    Alias,
    Assign,
    Binary,
    Block,
    Braces,
    Declare,
    Express,
    If,
    Leave,
    Loop,
    Name,
    Named,
    Node,
    PointerTo,
    Return,
    Switch,
    Unary,
)


class Statements(FunctionContext):
    """Part of `FunctionPrinter`."""

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
        if self._may_go_together(node):
            self._around.append(node)
            if isinstance(node, If):
                self._if_together(node)
            elif isinstance(node, Loop):
                self._loop_together(node)
            self._around.pop()
            return
        compound = isinstance(node, If | Loop | Switch) or (isinstance(node, Block) and node.scope)
        mine = self._group and compound and (self._nest > 0 or id(node) not in self._facts.barriers)
        if mine:
            self._thread_line("{")
            self._nest += 1
        self._around.append(node)
        self._statement_of(node)
        self._around.pop()
        if mine:
            self._nest -= 1
            self._thread_line("}")

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
                    self._thread_line(text + ";")
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
                raise CudaSourceError("this statement is not supported", node.line)

    def _whole_block(self, node: Node) -> bool:
        """Whether a statement contains a barrier and is printed once for the block."""
        return self._group and self._nest == 0 and id(node) in self._facts.barriers

    def _nested_of(self, head: str, node: Node, tail: str) -> None:
        """Print a statement between a head and a tail."""
        if self._group and self._nest == 0:
            self.boundary()
            self.line(head)
            self._nested(node)
            self.boundary()
            self.line(tail)
        else:
            self._thread_line(head)
            self._nested(node)
            self._thread_line(tail)

    def _effect(self, node: Node) -> str:
        """Return the text of an expression whose value is not used."""
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
        leaves = node.other is None and _leaves(node.then)
        head = f"if ({self.assumed(condition, not leaves)}) {{"
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
        """Print an `if` whose threads differ and exchange values in a branch: a mask marks the threads of each branch."""
        outer = self._mask, self._first, self._past
        asked = self.kept("w_b1", condition.text, 1)
        for branch, sign in ((node.then, ""), (node.other, "!")):
            if branch is None:
                continue
            self.boundary()
            mask, first, past = self._fresh("mask"), self._fresh("first"), self._fresh("past")
            threads = self.whole.threads
            self._kept("w_b1", 1, mask)
            self._hoisted.append(f"  w_u32 {first}, {past};")
            self.line(f"for (w_u32 k = 0u; k < {threads}u; k++) {mask}[k] = 0;")
            self._thread_line(f"{mask}[w_t] = {sign}{asked}[w_t];")
            self.boundary()
            self.line(f"for ({first} = 0u; {first} < {threads}u && !{mask}[{first}]; {first}++) ;")
            self.line(f"for ({past} = {threads}u; {past} > {first} && !{mask}[{past} - 1u]; {past}--) ;")
            self.line(f"if ({first} < {threads}u) {{")
            self._mask, self._first, self._past = mask, first, past
            self.line(f"  w_t = {first};")
            with self._under(True, node.line, True):
                self._nested(branch)
            self.boundary()
            self._mask, self._first, self._past = outer
            self.line("}")
            self.line(f"w_t = {self._first};")

    def _decided(self, condition: Value, node: Node) -> str:
        """Return a condition on which all threads agree, evaluated once for the block."""
        if not has_side_effects(node):
            self.boundary()
            return condition.text
        name = self.kept("w_b1", condition.text, 1)
        self.boundary()
        return f"{name}[{self._first}]"

    def _loop_of_block(self, node: Loop) -> None:
        """Print a loop that contains barriers."""
        self._scopes.append({})
        if node.init is not None:
            self._statement(node.init)
        variable = self._scopes[-1].get(node.init.name) if isinstance(node.init, Declare) else None
        if variable is not None and self._same_in_body(node, variable):
            variable.value.linear = lockstep.uniform(variable.value.text.replace("[w_t]", f"[{self._first}]"))
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
            if variable is not None:
                variable.value.linear = None
            self.line(f"{label}: ;")
            if node.first:
                self._ask(None if node.condition is None else self._truth(node.condition), node)
            elif node.step is not None:
                text = self._effect(node.step)
                if text:
                    self._thread_line(text + ";")
                self.boundary()
        self._loops.pop()
        self._indent -= 1
        self.line("}")
        self.free += before
        self._scopes.pop()

    def _same_in_body(self, node: Loop, variable: Variable) -> bool:
        """Whether a loop's variable has one value in all threads, which the loop's body does not change."""
        assert isinstance(node.init, Declare)
        return (
            self._together
            and not self._mask
            and not node.first
            and variable.value.place == "var"
            and isinstance(variable.value.type, Scalar)
            and not variable.value.type.real
            and variable.key not in self._facts.varying
            and not may_change(node.body, node.init.name, self.whole.unit.functions)
            and not may_change(node.condition, node.init.name, self.whole.unit.functions)
        )

    def _ask(self, condition: Value | None, node: Loop) -> None:
        asked = "w_go(w_status)"
        if condition is not None and node.condition is not None:
            asked = f"({self._decided(condition, node.condition)}) && {asked}"
        self.boundary()
        self.line(f"if (!({asked})) break;")

    def _may_go_together(self, node: Node) -> bool:
        """Whether a loop's iterations, or a branch with loops, may be printed for threads in lockstep."""
        if (
            not self._together
            or self._nest
            or self._mask
            or id(node) in self._facts.barriers
            or id(node) in self._alone
        ):
            return False
        if isinstance(node, If):
            return node.other is None and not node.constexpr and contains(node.then, (Loop,)) and not _jumps(node.then)
        return isinstance(node, Loop) and not node.first and isinstance(node.init, Declare) and not _jumps(node.body)

    def _if_together(self, node: If) -> None:
        """Print a branch for threads in lockstep, for the case that all threads take it, and else for each thread."""
        always = self._truth(node.condition).always
        if always:
            self.boundary()
            self.line(f"if ({always}) {{")
            self._nested(node.then)
            self.boundary()
            self.line("} else {")
        self._alone.add(id(node))
        self._resting += bool(always)
        self._statement(node)
        self._resting -= bool(always)
        self._alone.discard(id(node))
        if always:
            self.boundary()
            self.line("}")

    def _loop_together(self, node: Loop) -> None:
        """Print a loop's iterations in which all threads take part for threads in lockstep, with the loops over threads inside.

        Then print the other iterations, which each thread has on its own.
        """
        assert isinstance(node.init, Declare)
        self._scopes.append({})
        self._statement(node.init)
        if self._iterations_together(node, self._scopes[-1][node.init.name]):
            rest = self.whole.rests.setdefault(id(node), Loop(node.line, None, node.condition, node.step, node.body))
            self._resting += self._went_together
            self._statement(rest)
            self._resting -= self._went_together
            self.boundary()
        self._scopes.pop()

    def _iterations_together(self, node: Loop, variable: Variable) -> bool:
        """Print the iterations in which all threads take part. Return whether threads may have others."""
        kept, kind = variable.value, variable.value.type
        self._went_together = False
        first, step = self._first_values.get(variable.key), self._step(node, variable)
        if first is None or step is None or node.condition is None or not isinstance(kind, Scalar):
            return True
        by, sign = step
        grown = self._fresh("grown")
        wide = "w_u64" if kind.size == 8 else "w_u32"
        text = f"(({kind.text})(({wide})({first.text}) {sign} ({wide}){grown}))"
        here = lockstep.at(text, [self.whole.where("tid", k) for k in range(3)])
        linear = Linear(text, first.slopes, first.checks)
        variable.value = Value(here, kind, None, "", "", kept.varying, linear=linear)
        condition = self._truth(node.condition)
        same = not (condition.varying or self._left or has_side_effects(node.condition))
        asked = condition.text if same else condition.always
        if asked:
            self._hoisted.append(f"  w_u64 {grown};")
            self.boundary()
            before, self.free = self.free, 0
            self.line(f"for ({grown} = 0; ({asked}) && w_go(w_status); {grown} += (w_u64)({by})) {{")
            self._nested(node.body)
            self.boundary()
            self.line("}")
            self.free += before
        variable.value = kept
        self._went_together = bool(asked)
        if asked and not same:
            self._thread_line(f"{kept.text} = {here};")
        return not same

    def _step(self, node: Loop, variable: Variable) -> tuple[str, str] | None:
        """Return by how much a loop's variable changes, and the sign, if it is the same in all threads and iterations."""
        step, init, kind = node.step, node.init, variable.value.type
        assert isinstance(init, Declare)
        by = "1"
        if isinstance(step, Unary) and step.op in ("++", "p++", "--", "p--"):
            to, sign = step.on, step.op[-1]
        elif isinstance(step, Assign) and step.op in ("+", "-"):
            to, sign = step.to, step.op
            value = self.value(step.value)
            known = lockstep.linear_of(value)
            if known is None or known.slopes != ("", "", "") or not isinstance(value.type, Scalar):
                return None
            by = f"(w_i64)({known.text})" if value.type.signed else known.text
        else:
            return None
        functions = self.whole.unit.functions
        fine = (
            isinstance(to, Name)
            and to.name == init.name
            and isinstance(kind, Scalar)
            and kind.name in ("i32", "u32", "i64", "u64")
            and not may_change(node.body, init.name, functions)
            and not may_change(node.condition, init.name, functions)
        )
        return (by, sign) if fine else None

    def _loop(self, node: Loop) -> None:
        self.whole.alone = self.whole.alone or not self._resting
        self._scopes.append({})
        self._thread_line("{")
        self._indent += 1
        turns = self._turns(node)
        if node.init is not None:
            self._statement(node.init)
        before = self.free
        self.free = 0
        text, varying = "1", False
        # The condition is printed before the body; what is learned of variables is the same in any order.
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
        if turns and before + work <= MAX_UNCHECKED_NODES:
            self.free = before + work
            asked = text
        else:
            self.free = before + self.free
            asked = "w_go(w_status)" if text == "1" else f"({text}) && w_go(w_status)"
        if node.first:
            self._thread_line("do {")
            self._lines += body
            self._thread_line(f"}} while ({asked});")
        else:
            self._thread_line(f"for (; {asked}; {step}) {{")
            self._lines += body
            self._thread_line("}")
        self._indent -= 1
        self._thread_line("}")
        self._scopes.pop()

    def _turns(self, node: Loop) -> int:
        """Return the maximum number of iterations of a loop with constant bounds; 0 if it is not known."""
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
        if (
            turns > MAX_UNCHECKED_TURNS
            or max(abs(first[1]), abs(last[1])) > 1 << 30
            or may_change(node.body, init.name)
        ):
            return 0
        return max(turns, 1)

    def _leave(self, node: Leave) -> None:
        loops = [x for x in self._loops if node.how == "break" or isinstance(x, Loop)]
        if not loops:
            raise CudaSourceError(f"{node.how} must be inside of a loop or switch", node.line)
        if self._control:
            for loop in reversed(self._loops):
                self._facts.divergent.add(id(loop))
                if loop is loops[-1]:
                    break
        loop = loops[-1]
        if self._group and not self._control and id(loop) in self._facts.barriers:
            # The whole block leaves the loop, so the enclosing statements are printed for the block.
            at = self._around.index(loop)
            self._facts.barriers.update(id(x) for x in self._around[at:])
            if any(isinstance(x, Switch) for x in self._around[at:]):
                self.pending_error = CudaSourceError(
                    f"{node.how} inside of a switch in a loop with a barrier is not supported: use if", node.line
                )
            self.boundary()
            self.line(f"{node.how};" if node.how == "break" else f"goto {self._continues.get(id(loop), 'w_turn')};")
            return
        self._thread_line(f"{node.how};")

    def _switch(self, node: Switch) -> None:
        on = self.value(node.on)
        if not isinstance(on.type, Scalar) or on.type.real:
            raise CudaSourceError("the value of a switch must be an integer", node.line)
        kind = promoted(on.type)
        self._thread_line(f"switch ({self.converted(on, kind, node.line).text}) {{")
        self._indent += 1
        self._loops.append(node)
        self._scopes.append({})
        with self._under(on.varying or id(node) in self._facts.divergent, node.line):
            for labels, body in node.cases:
                for label in labels:
                    if label is None:
                        self._thread_line("default:")
                    else:
                        known = self.types.typed_constant(label, self.bound)
                        self._thread_line(f"case {literal(kind, wrapped(known[1], kind))}:")
                self._thread_line("{")
                self._nested(Block(node.line, body))
                self._thread_line("}")
        self._scopes.pop()
        self._loops.pop()
        self._indent -= 1
        self._thread_line("}")

    def _return(self, node: Return) -> None:
        kind = self.result_type()
        if self._control:
            self._left = self._left or node.line
            for loop in self._loops:
                self._facts.divergent.add(id(loop))
        elif self._group:
            # The whole block returns, so the enclosing statements are printed for the block.
            self._facts.barriers.update(id(x) for x in self._around)
            if any(isinstance(x, Switch) for x in self._around):
                self.pending_error = CudaSourceError(
                    "return inside of a switch in a function with a barrier is not supported: use if", node.line
                )
        if node.value is None:
            if not isinstance(kind, Void):
                raise CudaSourceError(f"{self._function.name} must return {kind}", node.line)
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
                raise CudaSourceError("a function cannot return pointers into different memories", node.line)
            if value.type.space != "?":
                target = self.types.of(written, self.bound, node.line)
                assert isinstance(target, Pointer)
                kind = self._facts.result = Pointer(target.to, value.type.space, target.const)
            self._facts.result_root = joined_root(self._facts.result_root, value.root)
        if isinstance(kind, Void):
            if not isinstance(value.type, Void):
                raise CudaSourceError(f"{self._function.name} is void and cannot return a value", node.line)
            self._thread_line(f"{value.text or '(void)0'};")
            self._leave_function()
            return
        text = self.converted(value, kind, node.line).text
        if self._group:
            self._thread_line(f"w_result[w_t] = {text};")
            self._leave_function()
        else:
            self._thread_line(f"return {text};")

    def _leave_function(self) -> None:
        """Print the end of the function for one thread, or for the whole block."""
        if not self._group:
            self._thread_line("return;")
        elif self._control:
            self._thread_line(f"{{ w_left[w_t] = 1; w_gone = 1; goto {self._label}; }}")
        else:
            self.boundary()
            self.line("return;")


def _jumps(node: object) -> bool:
    """Whether a statement returns, or leaves or continues a loop."""
    return contains(node, (Return, Leave))


def _leaves(node: Node) -> bool:
    """Whether a statement only returns or leaves a loop."""
    while isinstance(node, Block) and len(node.body) == 1:
        node = node.body[0]
    return isinstance(node, Return | Leave)
