"""Prints conversions: loads from memory, C's conversions, casts, and vectors and structs made of values."""

from __future__ import annotations

from collections.abc import Sequence

from wooly_cuda_c.printing import lockstep
from wooly_cuda_c.printing.accesses import PASS
from wooly_cuda_c.printing.context import FunctionContext
from wooly_cuda_c.printing.scope import literal
from wooly_cuda_c.printing.types import (
    B1,
    F32,
    F64,
    I32,
    VOID,
    Array,
    Pointer,
    Scalar,
    Struct,
    Type,
    Vector,
    Void,
    wrapped,
)
from wooly_cuda_c.printing.values import Value
from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.tree import (
    Braces,
    Cast,
    Node,
    ReferenceTo,
)


class Conversions(FunctionContext):
    """Part of `FunctionPrinter`."""

    def loaded(self, value: Value, line: int) -> Value:
        """Load a value from memory."""
        if value.place != "mem":
            if value.const is not None and isinstance(value.type, Scalar):
                text = literal(value.type, value.const)
                return Value(text, value.type, value.const)
            return Value(
                value.text, value.type, value.const, "", "", value.varying, value.root,
                linear=value.linear, always=value.always, never=value.never,
            )  # fmt: skip
        if isinstance(value.type, Array):
            pointer = Pointer(value.type.of, value.space, value.readonly)
            return Value(value.text, pointer, None, "", "", value.varying, value.root, linear=value.linear)
        if isinstance(value.type, Void):
            raise CudaSourceError("a void pointer cannot be read, because its type is not known: cast it", line)
        load = self.helpers.load(value.space, value.type)
        place = self.whole.place(line, value.root)
        varying = value.varying or value.space == "p"
        covered = self.covered(value)
        if covered:
            self.helpers.near(load, "load", value.space, value.type)
        return Value(f"{load}({PASS}{covered}, {value.text}, {place})", value.type, None, "", "", varying)

    def _truth(self, node: Node) -> Value:
        return self.as_truth(self.value(node), node.line)

    def as_truth(self, value: Value, line: int) -> Value:
        if isinstance(value.type, Pointer):
            return Value(f"({value.text}.n != 0)", B1, None, "", "", value.varying)
        if not isinstance(value.type, Scalar):
            raise CudaSourceError(f"{value.type} cannot be a condition", line)
        if value.type == B1:
            return value
        if value.type.half:
            value = self._number(value, F32)
        const = None if value.const is None else int(bool(value.const))
        return Value(f"({value.text} != 0)", B1, const, "", "", value.varying)

    def converted(self, value: Value, kind: Type, line: int) -> Value:
        """Convert a value to another type, by C's rules for assignments."""
        if value.type == kind:
            return value
        if isinstance(kind, Scalar) and isinstance(value.type, Scalar):
            return self._number(value, kind)
        if isinstance(kind, Pointer):
            return self._pointer(value, kind, line)
        if isinstance(value.type, Pointer):
            raise CudaSourceError(f"a pointer cannot become {kind}: kernels must not see addresses", line)
        raise CudaSourceError(f"{value.type} cannot become {kind}", line)

    def _number(self, value: Value, kind: Scalar) -> Value:
        source = value.type
        assert isinstance(source, Scalar)
        if source.half and kind != source:
            wide = Value(f"w_{source.name}_to_f32({value.text})", F32, None, "", "", value.varying)
            return self._number(wide, kind) if kind != F32 else wide
        if kind.half:
            if value.const is not None:
                return Value(literal(kind, value.const), kind)
            if source != F64:
                value = self._number(value, F32) if source != F32 else value
            return Value(f"w_{value.type.name}_to_{kind.name}({value.text})", kind, None, "", "", value.varying)  # type: ignore[union-attr]
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
        return Value(text, kind, None, "", "", value.varying, linear=lockstep.converted(value, kind, self.whole.block))

    def _pointer(self, value: Value, kind: Pointer, line: int) -> Value:
        source = value.type
        if not isinstance(source, Pointer):
            if value.const == 0:
                space = "g" if kind.space == "?" else kind.space
                return Value(f"w_null_{space}()", Pointer(kind.to, kind.space, kind.const))
            raise CudaSourceError(f"{source} cannot become a pointer: its bounds are not known", line)
        if source.space == "?":
            return Value(f"w_null_{'g' if kind.space == '?' else kind.space}()", kind)
        if kind.space not in ("?", source.space):
            raise CudaSourceError("a pointer cannot change between two memories", line)
        if source.const and not kind.const:
            raise CudaSourceError("a pointer to const cannot become a pointer to non-const", line)
        if source.to != kind.to and not isinstance(kind.to, Void):
            raise CudaSourceError(f"{source} cannot become {kind} without a cast", line)
        pointer = Pointer(kind.to, source.space, kind.const)
        return Value(value.text, pointer, None, "", "", value.varying, value.root, linear=value.linear)

    def memory(self, value: Value, line: int) -> Value:
        """Give an object an address in memory; a variable gets one."""
        if value.place == "mem":
            return value
        if value.place != "var" or isinstance(value.type, Pointer):
            raise CudaSourceError("this expression has no address", line)
        self._mark(value.variable)
        space = value.space or "p"
        text = f"w_mk_{space}(({self.dialect.spaces[space]} w_u8 *)&{value.text}, {value.type.size})"
        return Value(text, value.type, None, "mem", space, True, "a variable", value.readonly, value.variable)

    def _cast(self, node: Cast) -> Value:
        line = node.line
        to = node.to
        if isinstance(to, ReferenceTo):
            raise CudaSourceError("casts to references are not supported", line)
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
            raise CudaSourceError(
                "reinterpret_cast is only for pointers: use __float_as_int and similar functions", line
            )
        return self.converted(value, kind, line)

    def _cast_pointer(self, value: Value, kind: Pointer, node: Cast) -> Value:
        line = node.line
        source = value.type
        if not isinstance(source, Pointer):
            if value.const == 0:
                return Value("w_null_g()", Pointer(kind.to, "?", kind.const))
            raise CudaSourceError(f"{source} cannot be cast to a pointer: its bounds are not known", line)
        if source.space == "?":
            return Value("w_null_g()", kind)
        if source.const and not kind.const:
            # The kernel must not write memory through another name if the launch only reads it.
            kind = Pointer(kind.to, kind.space, True)
        to, space = kind.to, source.space
        text = value.text
        if to != source.to and not isinstance(to, Void):
            text = f"w_as_{space}({text}, {to.size}u, {to.align}u)"
        return Value(text, Pointer(to, space, kind.const), None, "", "", value.varying, value.root)

    def built(self, kind: Type, parts: Sequence[str]) -> str:
        """Return the text that makes a vector or a struct."""
        return f"{self.whole.maker(kind)}({', '.join(parts)})"

    def _built(self, kind: Type, braces: Braces, line: int) -> Value:
        if isinstance(kind, Scalar):
            if len(braces.items) > 1:
                raise CudaSourceError(f"{len(braces.items)} values cannot initialize {kind}", line)
            if not braces.items:
                return Value(literal(kind, 0), kind, 0)
            return self.converted(self.value(braces.items[0]), kind, line)
        if isinstance(kind, Vector):
            fields: list[Type] = [kind.of] * kind.n
        elif isinstance(kind, Struct) and not any(isinstance(t, Array) for _, t, _ in kind.fields):
            fields = [t for _, t, _ in kind.fields]
        else:
            raise CudaSourceError(f"{kind} cannot be initialized with braces here", line)
        if len(braces.items) > len(fields):
            raise CudaSourceError(f"{len(braces.items)} values cannot initialize {kind}", line)
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
