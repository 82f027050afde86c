"""Prints declarations: variables, arrays, references, shared memory."""

from __future__ import annotations

from wooly_cuda_c.printing import lockstep
from wooly_cuda_c.printing.arithmetic import POINTER, held_size, is_readonly
from wooly_cuda_c.printing.context import FunctionContext
from wooly_cuda_c.printing.types import (
    Array,
    Pointer,
    Scalar,
    Struct,
    Type,
    Vector,
    Void,
)
from wooly_cuda_c.printing.values import Value, Variable
from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.tree import (
    ArrayOf,
    Braces,
    Declare,
    Named,
    Number,
    ReferenceTo,
    Written,
)


class Declarations(FunctionContext):
    """Part of `FunctionPrinter`."""

    def _variable(self, node: Declare) -> None:
        if node.shared:
            self._shared(node)
            return
        if node.extern or node.constant:
            raise CudaSourceError(
                f"{node.name}: extern and __constant__ are not supported inside a function", node.line
            )
        written, key = node.type, id(node)
        if isinstance(written, ReferenceTo):
            self._reference(node, written)
            return
        if isinstance(written, ArrayOf):
            self._array(node, written)
            return
        const = node.constexpr or (isinstance(written, Named) and written.const)
        kind, value = self._initial(node, written)
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
        if value is not None:
            self._first_values[key] = lockstep.linear_of(value)
        if self._together and value is not None and self.fixed(node.name):
            held.linear, held.always, held.never = value.linear, value.always, value.never
        self.private += kind.size
        if lasting:
            zero = self._zero(kind)
            start = value.text if value is not None else f"({kind.text}){zero}" if zero[0] == "{" else zero
            self._thread_line(f"{self._kept(kind.text, held_size(kind), name)} = {start};")
        else:
            self._thread_line(f"{kind.text} {name} = {self._zero(kind) if value is None else value.text};")
        self._declare(node.name, variable, node.line)

    def _initial(self, node: Declare, written: Written) -> tuple[Type, Value | None]:
        """Return the type of a variable, and its initial value, not yet converted to this type."""
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
            raise CudaSourceError(f"{node.name}: a variable cannot be void", node.line)
        return kind, value

    def _zero(self, kind: Type) -> str:
        if isinstance(kind, Pointer):
            return f"w_null_{'g' if kind.space == '?' else kind.space}()"
        return "{0}" if isinstance(kind, Vector | Struct | Array) else "0"

    def _reference(self, node: Declare, written: ReferenceTo) -> None:
        if node.init is None or isinstance(node.init, Braces):
            raise CudaSourceError(f"{node.name}: a reference needs an initial object", node.line)
        to = self.memory(self.expression(node.init), node.line)
        if not (isinstance(written.to, Named) and written.to.name == "auto"):
            kind = self.types.of(written.to, self.bound, node.line)
            if kind != to.type:
                raise CudaSourceError(
                    f"{node.name} is a reference to {kind}, but its initial object is {to.type}", node.line
                )
        name = self._fresh(node.name)
        const = isinstance(written.to, Named) and written.to.const
        if self._group and self._nest == 0:
            text = self._kept(f"w_{to.space}p", POINTER, name)
            self._thread_line(f"{text} = {to.text};")
            name = text
        else:
            self._thread_line(f"w_{to.space}p {name} = {to.text};")
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
            raise CudaSourceError(f"{node.name}: initialize an array with {{ }}", node.line)
        zero = self._zero(element)
        if self._group and self._nest == 0:
            self._kept(element.text, element.size, name, n)
            zero = f"({element.text}){zero}" if zero[0] == "{" else zero
            self._thread_line(f"for (w_u32 k = 0u; k < {n}u; k++) {name}[w_t * {n}u + k] = {zero};")
            for k, item in enumerate(items):
                if item != "0":
                    self._thread_line(f"{name}[w_t * {n}u + {k}u] = {item};")
            name = f"({name} + w_t * {n}u)"
        elif items and any(x != "0" for x in items):
            self._thread_line(f"{element.text} {name}[{n}] = {{{', '.join(items)}}};")
        else:
            self._thread_line(f"{element.text} {name}[{n}] = {{{zero}}};")
        const = is_readonly(written)
        space = "l" if self._group and self._nest == 0 else "p"
        pointer = f"w_mk_{space}(({self.dialect.spaces[space]} w_u8 *){name}, {kind.size})"
        held = Value(pointer, kind, None, "mem", space, space == "l", f"the array {node.name}", const)
        variable = Variable(id(node), held)
        held.variable = variable
        self._declare(node.name, variable, node.line)

    def _flat(self, braces: Braces, kind: Type, line: int) -> list[str]:
        """Return the values of an array's elements. Missing numbers are zeros."""
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
                raise CudaSourceError("each row of an array needs its own braces", line)
            else:
                value = self.value(item)
                out.append(self.converted(value, kind.of, line).text)
        n = kind.size // element.size
        if len(out) > n:
            raise CudaSourceError(f"the array has {n} elements, but {len(out)} values", line)
        if isinstance(element, Scalar):
            return out + ["0"] * (n - len(out))
        return out

    def _shared(self, node: Declare) -> None:
        if not self._function.kernel and node.extern is False:
            pass  # as in CUDA, the block shares an array of a device function
        written = node.type
        if node.init is not None:
            raise CudaSourceError(
                f"{node.name}: shared memory cannot have initial values: it starts with zeros", node.line
            )
        if node.extern:
            if not (isinstance(written, ArrayOf) and written.count is None):
                raise CudaSourceError(
                    f"{node.name}: an extern __shared__ array must not have a size: the launch gives it", node.line
                )
            held = self.whole.dynamic_shared(self.types.of(written.of, self.bound, node.line), node.name)
        else:
            kind = self.types.of(written, self.bound, node.line)
            held = self.whole.static_shared((id(node), self._instance.name), kind, node.name, node.line)
        held.variable = Variable(id(node), held)
        self._declare(node.name, held.variable, node.line)
