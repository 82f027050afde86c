"""Prints assignments and updates of variables and memory."""

from __future__ import annotations

from wooly_cuda_c.printing.accesses import PASS
from wooly_cuda_c.printing.arithmetic import WORDS, joined_root
from wooly_cuda_c.printing.context import FunctionContext
from wooly_cuda_c.printing.types import (
    B1,
    Array,
    Pointer,
    Scalar,
)
from wooly_cuda_c.printing.values import Value
from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.tree import (
    Assign,
    Braces,
)


class Assignments(FunctionContext):
    """Part of `FunctionPrinter`."""

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
            raise CudaSourceError("this expression cannot be assigned to", line)
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
        self.whole.record_write(to.root)
        covered = self.covered(to)
        if covered:
            self.helpers.near(store, "store", to.space, to.type)
        return Value(
            f"{store}({PASS}{covered}, {to.text}, {value.text}, {place})", to.type, None, "", "", value.varying
        )

    def _learn_pointer(self, to: Value, value: Value, line: int) -> None:
        variable, kind = to.variable, to.type
        assert variable is not None
        assert isinstance(kind, Pointer)
        if isinstance(value.type, Pointer) and value.type.space != "?":
            if kind.space == "?":
                self._facts.spaces.setdefault(variable.key, value.type.space)
                to.type = variable.value.type = Pointer(kind.to, value.type.space, kind.const)
            root = joined_root(self._facts.roots.get(variable.key, variable.value.root), value.root)
            self._facts.roots[variable.key] = variable.value.root = root

    def _update(self, to: Value, op: str, value: Value, line: int, before: bool) -> Value:
        """Print ``op=``, ``++`` or ``--``."""
        self._writable(to, line)
        self._learn(to, value.varying)
        varying = to.varying or value.varying
        if to.place == "var":
            held = Value(to.text, to.type, None, "", "", varying, to.root)
            made = self.operate(op, held, value, line)
            made = self.converted(made, to.type, line)
            if not before:
                return Value(f"({to.text} = {made.text})", to.type, None, "", "", varying, to.root)
            # Compute the value before from the value after. This is exact for integers and pointers, because they wrap.
            if isinstance(to.type, Scalar) and (to.type.real or to.type == B1):
                raise CudaSourceError(
                    f"the value of a postfix {op}{op} of {to.type} is not supported: use it as a statement", line
                )
            after = Value(f"({to.text} = {made.text})", to.type, None, "", "", varying, to.root)
            back = self.operate("-" if op == "+" else "+", after, value, line)
            return self.converted(back, to.type, line)
        kind = to.type
        if not isinstance(kind, Scalar) or not isinstance(value.type, Scalar):
            raise CudaSourceError(f"{op}= between {kind} and {value.type} is not supported", line)
        old = Value("old", kind)
        new = self._number(self.operate(op, old, Value("v", value.type), line), kind)
        update = self.helpers.update(to.space, kind, WORDS[op], value.type, new.text, before)
        place = self.whole.place(line, to.root)
        self.whole.record_write(to.root)
        covered = "" if before else self.covered(to)
        if covered:
            self.helpers.near_update(update, to.space, kind, value.type, new.text)
        return Value(
            f"{update}({PASS}{covered}, {to.text}, {value.text}, {place})",
            kind,
            None,
            "",
            "",
            varying or to.space == "p",
        )
