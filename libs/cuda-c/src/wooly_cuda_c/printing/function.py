"""Prints one function: every load, store and atomic is checked, every loop can be ended, and all results are defined.

Signed numbers are added as unsigned ones, shifts use the low bits, a division by 0 gives 0, and all variables are initialized to
0. Otherwise a vendor's compiler could remove a check. All threads of a block must reach a barrier, or no thread. To check this,
the printer learns which values differ between threads (`Facts`): it prints the function again until it learns nothing new.

Some devices run a block's threads in turn (`Dialect.flat`). There, the printer does not leave it to PoCL to split kernels at
barriers, because PoCL evaluates some conditions only once for threads that differ. The printer prints a function with barriers
for the whole block. The code between two barriers is a loop over the threads, which `w_t` counts, and every variable has memory
for each thread. Conditions and loops around barriers are evaluated once for the block. If only some threads exchange values
within their warps, a mask marks these threads, and the others skip the code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wooly_cuda_c.printing import lockstep
from wooly_cuda_c.printing.arithmetic import POINTER, held_size, may_change
from wooly_cuda_c.printing.declarations import Declarations
from wooly_cuda_c.printing.expressions import Expressions
from wooly_cuda_c.printing.statements import Statements
from wooly_cuda_c.printing.types import (
    Void,
)
from wooly_cuda_c.printing.values import Value, Variable
from wooly_cuda_c.syntax.tree import (
    ReferenceTo,
)

if TYPE_CHECKING:
    pass


class FunctionPrinter(Statements, Declarations, Expressions):
    """Prints one function; see `FunctionContext`."""

    # -- the whole function ----------------------------------------------------------------------------------------

    def run(self) -> str:
        """Return the function's text."""
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
                if self._group and may_change(function.body, param.name):
                    held_text = self._kept(text, POINTER if reference else held_size(kind), name + "_own")
                    start.append((held_text, name))
            key = id(param)
            varying = value.varying or key in self._facts.varying
            if reference:
                held = Value(held_text, kind, None, "mem", value.space, varying, value.root, value.readonly)
            else:
                space = "l" if held_text != name else "p"
                held = Value(held_text, kind, None, "var", space, varying, self._facts.roots.get(key, value.root))
                if self._group and function.kernel and held_text == name:
                    held.linear = lockstep.uniform(name)
                self.private += kind.size
            variable = Variable(key, held, reference)
            held.variable = variable
            self._declare(param.name, variable, param.line)
        for to, of in start:
            self._thread_line(f"{to} = {of};")
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
                self._hoisted.append("  w_b1 w_gone = 0;")
                self._hoisted.append(f"  for (w_t = 0u; w_t < {self.whole.threads}u; w_t++) w_left[w_t] = 0;")
                self._hoisted.append("  w_t = 0u;")
            if instance.masked:
                params += [f"{self.dialect.spaces['l']} w_b1 *w_active", "w_u32 w_first", "w_u32 w_past"]
                self._hoisted.append("  w_t = w_first;")
        elif not isinstance(kind, Void):
            tail = [f"  {kind.text} none = {self._zero(kind)};", "  return none;"]
        head = f"{self.dialect.function} {result} {instance.name}({', '.join([context, *params])})"
        return "\n".join([head + " {", *self._hoisted, *self._lines, *tail, "}\n"])
