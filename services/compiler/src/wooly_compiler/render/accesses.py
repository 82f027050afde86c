"""Prints accesses to memory: loads, stores and atomics, with their conditions."""

from __future__ import annotations

from wooly_wis.dtypes import DType
from wooly_wis.kernel.ir import Array, Atomic, Const, Kernel, Load, Scratch, Store, has_lanes, walk
from wooly_wis.kernel.laws import Facts

from wooly_compiler.render.dialects import Dialect
from wooly_compiler.render.operations import Operations
from wooly_compiler.render.page import bare
from wooly_compiler.render.source import Form, RenderError


class Accesses(Operations):
    """A page that prints a kernel's accesses to memory.

    Args:
        kernel: the kernel to print.
        dialect: the dialect of C.
        form: how points become work-items.
        facts: what is known of the kernel's values.

    Attributes:
        dtypes, numel: type and number of elements of arrays and scratch, by name.
        loaded: names of the arrays and scratch that the kernel reads.
        grouped: whether a point is a work-group, in the form of threads.
        in_lanes: whether the current statements run once per lane.
        constants: values of the integers that are known.
        shared: declarations of shared memory at the head of the kernel, because OpenCL allows them only there.
    """

    def __init__(self, kernel: Kernel, dialect: Dialect, form: Form, facts: Facts) -> None:
        super().__init__(dialect, facts, kernel.body, {})
        self.kernel = kernel
        self.form = form
        memory: list[Array | Scratch] = [*kernel.arrays, *kernel.scratch]
        self.dtypes = {m.name: m.dtype for m in memory}
        self.numel = {m.name: m.numel for m in memory}
        self.loaded = {s.array for s in walk(kernel.body) if isinstance(s, (Load, Atomic))}
        self.grouped = has_lanes(kernel)
        self.in_lanes = False
        self.constants = {
            s.out: int(s.value) for s in walk(kernel.body) if isinstance(s, Const) and s.dtype is DType.I64
        }
        self.shared: list[str] = []

    def _condition(self, s: Load | Store | Atomic) -> str:
        """Return the condition under which the access happens; empty if it always happens."""
        parts = [self.text[s.mask]] if s.mask is not None else []
        if s.checked:
            unsigned = self.d.types[DType.U64]
            parts.append(f"({unsigned}){self.text[s.index]} < {self.numel[s.array]}{self.d.ulong_suffix}")
        return " && ".join(parts)

    def load(self, s: Load) -> None:
        dtype = self.dtypes[s.array]
        text = f"{s.array}[{bare(self.text[s.index])}]"
        if dtype is DType.BOOL:
            text = f"({text} != 0)"
        condition = self._condition(s)
        self.declare(s.out, dtype, f"{condition} ? {text} : 0" if condition else text)

    def _once(self) -> bool:
        """Whether one thread of the group must act for all threads."""
        return self.form is Form.SIMT and self.grouped and not self.in_lanes

    def store(self, s: Store) -> None:
        text = f"{s.array}[{bare(self.text[s.index])}] = {bare(self.text[s.value])};"
        condition = self._condition(s)
        if self._once():
            condition = f"t == 0 && {condition}" if condition else "t == 0"
        self.line(f"if ({condition}) {text}" if condition else text)
        if self._once() and s.array in self.loaded:
            self.line(f"{self.d.barrier};")

    def atomic(self, s: Atomic) -> None:
        dtype = self.dtypes[s.array]
        text = self.d.atomics.get((s.kind, dtype))
        if text is None:
            raise RenderError(f"{self.d.name} has no atomic {s.kind} of {dtype.label}")
        if any(x.name == s.array for x in self.kernel.scratch) and self.form is Form.LOOPS:
            raise RenderError("atomics on scratch are not supported in the form of loops; use an array")
        call = text.format(pointer=f"&{s.array}[{bare(self.text[s.index])}]", value=bare(self.text[s.value]))
        condition = self._condition(s)
        name = f"v{s.out}"
        self.text[s.out] = name
        if self._once():
            shared = f"once{s.out}"
            self.shared.append(self.d.shared.format(type=self.ctype(dtype), name=shared, n=1))
            condition = f" && {condition}" if condition else ""
            self.line(f"if (t == 0) {shared}[0] = 0;")
            self.line(f"if (t == 0{condition}) {shared}[0] = {call};")
            self.line(f"{self.d.barrier};")
            self.line(f"const {self.ctype(dtype)} {name} = {shared}[0];")
            return
        self.line(f"{self.ctype(dtype)} {name} = 0;")
        self.line(f"if ({condition}) {name} = {call};" if condition else f"{name} = {call};")
