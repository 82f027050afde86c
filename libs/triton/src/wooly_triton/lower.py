"""Translates TTIR to OpenCL C. One work-item runs one program; loops over the elements of tensors replace threads.

A pointer is a buffer of the launch and an element offset from the buffer's start. A pointer made of a number, or loaded from
memory, is rejected. Each load and store compares the offset with the buffer's length. Each loop checks whether the launch must
end. Tensors are arrays in private memory of the work-item, or expressions of the index, which each user repeats.
"""

from __future__ import annotations

from dataclasses import replace

from wooly_wis.dtypes import BY_LABEL
from wooly_wis.foreign import Parameter
from wooly_wis.languages import ForeignError, Lowered

from wooly_triton.control import Control
from wooly_triton.folds import Folds
from wooly_triton.memory import Memory
from wooly_triton.ops import BITS, C_TYPE, is_float
from wooly_triton.prelude import PRELUDE
from wooly_triton.shapes import Shapes
from wooly_triton.values import scalar
from wooly_triton.writer import size_of

_SCALAR_C = {
    "bool": "uchar",
    "i8": "char",
    "u8": "uchar",
    "i16": "short",
    "u16": "ushort",
    "i32": "int",
    "u32": "uint",
    "i64": "long",
    "u64": "ulong",
    "f16": "ushort",
    "bf16": "ushort",
    "f32": "float",
    "f64": "double",
}


class Lowering(Shapes, Memory, Folds, Control):
    """Lowers one function."""

    def run(self) -> Lowered:
        """Lower the function and return the complete source."""
        parameters, signature = self._parameters()
        blocks = self._function.blocks
        for block in blocks[1:]:
            self._entered[block.label] = [self._room(t) for _, t in block.args]
        for k, block in enumerate(blocks):
            if k:
                self._out(f"L{block.label[1:]}: if (W_END) return;")
                for (name, _), value in zip(block.args, self._entered[block.label], strict=True):
                    self._values[name] = value
            self._ops(block)
        self._out("return;")
        counts = [f"const ulong n{b}_{e} = n{b} / {size_of(e)};" for b, e in sorted(self._counts)]
        written = [replace(p, writes=p.buffer and k in self._written) for k, p in enumerate(parameters)]
        text = "\n".join(
            [
                PRELUDE,
                f"kernel __attribute__((reqd_work_group_size(1, 1, 1))) void w_{self._request.entry}({signature}) {{",
                *counts,
                *self._head,
                "if (W_END) return;",
                *self._lines,
                "}",
                "",
            ]
        )
        return Lowered(text, f"w_{self._request.entry}", tuple(written), tuple(self._places))

    def _parameters(self) -> tuple[list[Parameter], str]:
        args, given = self._function.args, self._request.args
        if len(args) != len(given):
            raise ForeignError(f"{self._request.entry} takes {len(args)} arguments, but the launch passes {len(given)}")
        parameters: list[Parameter] = []
        signature = ["global int *wooly_status"]
        for k, ((name, t), kind) in enumerate(zip(args, given, strict=True)):
            if t.shape is not None:
                raise ForeignError(f"argument {k} is a tensor; a kernel takes pointers and numbers")
            if t.pointer:
                signature += [f"global uchar *a{k}", f"ulong n{k}"]
                null = not kind.startswith("*")
                parameters.append(Parameter(BY_LABEL[kind] if null else None, not null))
                if null:  # a null pointer has a buffer of length 0
                    signature[-2:] = [f"ulong a{k}_null"]
                    self._head.append(f"global uchar *const a{k} = 0; const ulong n{k} = 0;")
                self._values[name] = scalar(t, "0l", k)
                continue
            bits = 8 * BY_LABEL[kind].itemsize if kind in BY_LABEL else 0
            floating = kind in BY_LABEL and BY_LABEL[kind].kind == "float"
            if bits != max(BITS[t.elem], 8) or floating != is_float(t.elem):
                raise ForeignError(f"argument {k} is {t}, but the launch passes {kind}")
            signature.append(f"{_SCALAR_C[kind]} a{k}")
            text = f"w_{t.elem}_of(a{k})" if t.elem in ("f16", "bf16") else f"(({C_TYPE[t.elem]})a{k})"
            self._values[name] = scalar(t, f"(a{k} != 0)" if t.elem == "i1" else text)
            parameters.append(Parameter(BY_LABEL[kind], False))
        return parameters, ", ".join(signature)
