"""Prints operators on values and pointers."""

from __future__ import annotations

from wooly_cuda_c.printing import lockstep
from wooly_cuda_c.printing.arithmetic import COMPARISONS, joined_root, operation
from wooly_cuda_c.printing.context import FunctionContext
from wooly_cuda_c.printing.scope import folded_binary, folded_unary, literal
from wooly_cuda_c.printing.types import (
    B1,
    F32,
    Pointer,
    Scalar,
    Type,
    Void,
    common,
    promoted,
)
from wooly_cuda_c.printing.values import Value
from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.tree import (
    Binary,
    Conditional,
    Number,
    Unary,
)


class Operators(FunctionContext):
    """Part of `FunctionPrinter`."""

    def _unary(self, node: Unary) -> Value:
        line = node.line
        if node.op in ("++", "--", "p++", "p--"):
            one = Number(line, "1", 1, "i32")
            return self._update(self.expression(node.on), node.op[-1], self.value(one), line, node.op[0] == "p")
        if node.op == "*":
            return self._at(self.value(node.on), None, line)
        if node.op == "&":
            value = self.memory(self.expression(node.on), line)
            pointer = Pointer(value.type, value.space, value.readonly)
            return Value(value.text, pointer, None, "", "", value.varying, value.root, linear=value.linear)
        value = self.value(node.on)
        if node.op == "!":
            truth = self.as_truth(value, line)
            const = None if truth.const is None else int(not truth.const)
            found = Value(f"(!{truth.text})", B1, const, "", "", truth.varying)
            found.always, found.never = truth.never, truth.always
            return found
        if not isinstance(value.type, Scalar) or (node.op == "~" and value.type.real):
            raise CudaSourceError(f"{node.op} of {value.type} is not supported", line)
        if value.type.half:
            turned = Value(f"({node.op}({self._number(value, F32).text}))", F32, None, "", "", value.varying)
            return self._number(turned, value.type)
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
            with self._conditionally(a.varying, line):
                b = self._truth(node.right)
            folded = folded_binary(node.op, *[None if x.const is None else (B1, x.const) for x in (a, b)])
            if folded is None and a.const is not None and bool(a.const) == (node.op == "||"):
                folded = B1, a.const
            const = None if folded is None else folded[1]
            found = Value(f"({a.text} {node.op} {b.text})", B1, const, "", "", a.varying or b.varying)
            all_, any_ = (a.always, b.always), (a.never, b.never)
            if node.op == "||":
                all_, any_ = any_, all_
            both = f"({all_[0]}) && ({all_[1]})" if all(all_) else ""
            one = " || ".join([f"({x})" for x in any_ if x])
            found.always, found.never = (both, one) if node.op == "&&" else (one, both)
            return found
        return self.operate(node.op, self.value(node.left), self.value(node.right), line)

    def operate(self, op: str, a: Value, b: Value, line: int) -> Value:
        """Print a binary operator on two values."""
        varying = a.varying or b.varying
        if isinstance(a.type, Pointer) or isinstance(b.type, Pointer):
            return self._pointers(op, a, b, line)
        if not (isinstance(a.type, Scalar) and isinstance(b.type, Scalar)):
            raise CudaSourceError(f"{op} between {a.type} and {b.type} is not supported: write it per component", line)
        kind = promoted(a.type) if op in ("<<", ">>") else common(a.type, b.type)
        if kind.real and op in ("%", "<<", ">>", "&", "|", "^"):
            raise CudaSourceError(f"{op} of {kind} is not supported", line)
        if kind.half:  # compute in float and round each result, which is exact
            made = self.operate(op, self._number(a, F32), self._number(b, F32), line)
            return made if op in COMPARISONS else self._number(made, kind)
        known = folded_binary(
            op,
            None if a.const is None else (a.type, a.const),
            None if b.const is None else (b.type, b.const),
        )
        if known is not None:
            return Value(literal(*known), known[0], known[1])
        x = self._number(a, kind) if a.type != kind else a
        y = self._number(b, kind) if b.type != kind and op not in ("<<", ">>") else b
        linear, always, never = lockstep.combined(op, kind, x, y, self.whole.block)
        if op in COMPARISONS:
            return Value(f"({x.text} {op} {y.text})", B1, None, "", "", varying, always=always, never=never)
        text = operation(op, kind, x.text, y.text, y.const)
        return Value(text, kind, None, "", "", varying, linear=linear)

    def _pointers(self, op: str, a: Value, b: Value, line: int) -> Value:
        varying = a.varying or b.varying
        if op in ("+", "-") and isinstance(a.type, Pointer) and isinstance(b.type, Scalar):
            return self._moved(a, b, op == "-", line)
        if op == "+" and isinstance(b.type, Pointer) and isinstance(a.type, Scalar):
            return self._moved(b, a, False, line)
        if isinstance(a.type, Pointer) and isinstance(b.type, Pointer):
            null = "?" in (a.type.space, b.type.space)
            if op in COMPARISONS and null:
                one = a if b.type.space == "?" else b
                if op in ("==", "!="):
                    return Value(f"({one.text}.n {op} 0)", B1, None, "", "", varying)
            elif a.type.space == b.type.space and (op in COMPARISONS or (op == "-" and a.type.to == b.type.to)):
                x, y = (f"w_where_{a.type.space}({p.text})" for p in (a, b))
                if op in COMPARISONS:
                    return Value(f"({x} {op} {y})", B1, None, "", "", varying)
                return Value(f"((w_i64)({x} - {y}) / {a.type.to.size})", Scalar("i64"), None, "", "", varying)
        if isinstance(b.type, Scalar) and b.const == 0 and op in ("==", "!="):
            return Value(f"({a.text}.n {op} 0)", B1, None, "", "", varying)
        raise CudaSourceError(f"{op} between {a.type} and {b.type} is not supported", line)

    def _moved(self, pointer: Value, by: Value, back: bool, line: int) -> Value:
        kind = pointer.type
        assert isinstance(kind, Pointer)
        assert isinstance(by.type, Scalar)
        if by.type.real:
            raise CudaSourceError("only an integer can be added to a pointer", line)
        if isinstance(kind.to, Void):
            raise CudaSourceError("arithmetic on a void pointer is not supported: cast it", line)
        # Widen a signed number with its sign, an unsigned one without.
        wide = "(w_u64)(w_i64)({1})" if by.type.signed else "(w_u64)({1})"
        sign = "(w_u64)0 - " if back else ""
        space = "g" if kind.space == "?" else kind.space
        text = f"w_by_{space}({{0}}, {sign}{wide} * {kind.to.size}u)"
        linear = lockstep.moved(pointer, by, text, kind.to.size, back, self.whole.block)
        varying = pointer.varying or by.varying
        return Value(text.format(pointer.text, by.text), kind, None, "", "", varying, pointer.root, linear=linear)

    def _at(self, pointer: Value, index: Value | None, line: int) -> Value:
        """Return the object that a pointer points to."""
        if not isinstance(pointer.type, Pointer):
            raise CudaSourceError(f"{pointer.type} is not a pointer", line)
        if index is not None:
            pointer = self._moved(pointer, index, False, line)
        kind = pointer.type
        assert isinstance(kind, Pointer)
        if isinstance(kind.to, Void):
            raise CudaSourceError("a void pointer cannot be read, because its type is not known: cast it", line)
        space = "g" if kind.space == "?" else kind.space
        return Value(
            pointer.text, kind.to, None, "mem", space, pointer.varying, pointer.root or "a null pointer", kind.const,
            linear=pointer.linear,
        )  # fmt: skip

    def _conditional(self, node: Conditional) -> Value:
        condition = self._truth(node.condition)
        with self._conditionally(condition.varying, node.line):
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
        root = joined_root(a.root, b.root)
        asked = self.assumed(condition)
        return Value(f"({asked} ? {x.text} : {y.text})", kind, None, "", "", varying, root)
