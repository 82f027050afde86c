"""Prints expressions: names, places and their values."""

from __future__ import annotations

from wooly_cuda_c.printing import builtins, lockstep
from wooly_cuda_c.printing.arithmetic import field_of
from wooly_cuda_c.printing.assignments import Assignments
from wooly_cuda_c.printing.calls import call
from wooly_cuda_c.printing.conversions import Conversions
from wooly_cuda_c.printing.operators import Operators
from wooly_cuda_c.printing.scope import literal
from wooly_cuda_c.printing.types import (
    U32,
    U64,
    VOID,
    Array,
    Pointer,
    Scalar,
    Vector,
)
from wooly_cuda_c.printing.values import Value
from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.tree import (
    Assign,
    Binary,
    Call,
    Cast,
    Conditional,
    Index,
    Member,
    Name,
    Node,
    Number,
    SizeOf,
    Unary,
)


class Expressions(Operators, Assignments, Conversions):
    """Part of `FunctionPrinter`."""

    def _lookup(self, node: Name) -> Value:
        for scope in reversed(self._scopes):
            variable = scope.get(node.name)
            if variable is not None:
                held = variable.value
                return Value(
                    held.text, held.type, held.const, held.place, held.space,
                    held.varying or variable.key in self._facts.varying, held.root, held.readonly,
                    held.variable or variable, held.linear, held.always, held.never,
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
            raise CudaSourceError(f"{node.name} is a function: pointers to functions are not supported", node.line)
        raise CudaSourceError(f"{node.name} is not declared", node.line)

    def value(self, node: Node) -> Value:
        """Print an expression and return its value."""
        return self.loaded(self.expression(node), node.line)

    def expression(self, node: Node) -> Value:
        self._count()
        match node:
            case Number(value=value, kind=kind):
                scalar = Scalar(kind)
                # Print the digits of a real number as the source has them.
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
        raise CudaSourceError("this expression is not supported", node.line)

    def _index(self, node: Index) -> Value:
        on = self.expression(node.on)
        index = self.value(node.index)
        if not isinstance(index.type, Scalar) or index.type.real:
            raise CudaSourceError("an index must be an integer", node.line)
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
                raise CudaSourceError(f"{node.on.name} has only x, y and z", node.line)
            k = "xyz".index(node.name)
            word = self.whole.where(builtins.PLACES[node.on.name], k)
            known = self.whole.block[k] if node.on.name == "blockDim" else None
            if known is not None:
                return Value(literal(U32, known), U32, known)
            varying = node.on.name == "threadIdx" and self.whole.block[k] != 1
            linear = lockstep.position(k) if varying else lockstep.uniform(f"((w_u32){word})")
            return Value(f"((w_u32){word})", U32, None, "", "", varying, linear=linear)
        on = self.expression(node.on)
        if node.arrow:
            on = self._at(self.loaded(on, node.line), None, node.line)
        offset, kind, text = field_of(on.type, node.name, node.line)
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
                raise CudaSourceError(
                    "an array field of a temporary value is not supported: store the value in a variable", node.line
                )
            self._mark(on.variable)
            space = on.space or "p"
            pointer = f"w_mk_{space}(({self.dialect.spaces[space]} w_u8 *){on.text}.{text}, {kind.size})"
            root = f"the field {node.name}"
            return Value(pointer, kind, None, "mem", space, True, root, on.readonly, on.variable)
        return Value(f"{on.text}.{text}", kind, None, on.place, on.space, on.varying, "", on.readonly, on.variable)

    def _declared(self, name: str) -> bool:
        return any(name in scope for scope in self._scopes)
