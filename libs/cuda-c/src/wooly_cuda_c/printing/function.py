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

from typing import TYPE_CHECKING

from wooly_cuda_c.printing.arithmetic import POINTER, changes, held_size
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

    # -- the whole -------------------------------------------------------------------------------------------------

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
                if self._group and changes(function.body, param.name):
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
