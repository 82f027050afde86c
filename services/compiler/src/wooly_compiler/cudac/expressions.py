"""Expressions: places and their values, arithmetic, pointers, conversions, assignments."""

from __future__ import annotations

from collections.abc import Sequence

from wooly_wis.cudac.errors import CudaSourceError
from wooly_wis.cudac.tree import (
    Assign,
    Binary,
    Braces,
    Call,
    Cast,
    Conditional,
    Index,
    Member,
    Name,
    Node,
    Number,
    ReferenceTo,
    SizeOf,
    Unary,
)

from wooly_compiler.cudac import builtins
from wooly_compiler.cudac.accesses import PASS
from wooly_compiler.cudac.arithmetic import ASKS, WORDS, field_of, joined_root, operation
from wooly_compiler.cudac.scope import folded_binary, folded_unary, literal
from wooly_compiler.cudac.types import (
    B1,
    F32,
    F64,
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
from wooly_compiler.cudac.values import Value


class Expressions:
    """Part of `FunctionPrinter`."""

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
        if value.type.half:
            value = self._number(value, F32)
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
        if kind.half:  # each result is rounded; a float has digits enough for that to be exact
            made = self.operate(op, self._number(a, F32), self._number(b, F32), line)
            return made if op in ASKS else self._number(made, kind)
        known = folded_binary(
            op,
            None if a.const is None else (a.type, a.const),
            None if b.const is None else (b.type, b.const),
        )
        if known is not None:
            return Value(literal(*known), known[0], known[1])
        x = self._number(a, kind) if a.type != kind else a
        y = self._number(b, kind) if b.type != kind and op not in ("<<", ">>") else b
        if op in ASKS:
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
            if op in ASKS and null:
                one = a if b.type.space == "?" else b
                if op in ("==", "!="):
                    return Value(f"({one.text}.n {op} 0)", B1, None, "", "", varying)
            elif a.type.space == b.type.space and (op in ASKS or (op == "-" and a.type.to == b.type.to)):
                x, y = (f"w_where_{a.type.space}({p.text})" for p in (a, b))
                if op in ASKS:
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
        root = joined_root(a.root, b.root)
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
            root = joined_root(self._facts.roots.get(variable.key, variable.value.root), value.root)
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
        update = self.helpers.update(to.space, kind, WORDS[op], value.type, new.text, before)
        place = self.whole.place(line, to.root)
        self.whole.wrote(to.root)
        return Value(
            f"{update}({PASS}, {to.text}, {value.text}, {place})", kind, None, "", "", varying or to.space == "p"
        )
