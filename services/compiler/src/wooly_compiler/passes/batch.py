"""Merges independent kernels into one: an optimizer's step over many tensors, or the parts of a result.

A launch costs the same for a bias of 64 numbers as for a matrix. Only kernels without folds are merged. Each becomes blocks of
lanes, and the number of a block says to which kernel it belongs. Every element is computed as before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from wooly_wis.dtypes import DType
from wooly_wis.kernel.builder import KernelBuilder, Value
from wooly_wis.kernel.ir import Apply, Array, Block, Const, Kernel, Load, Param, Scalar, Store, has_lanes, walk
from wooly_wis.plan import STATUS, KernelStep, LibraryStep, Step
from wooly_wis.program import Role

NAME = "batch"

#: Limits of one merged kernel, and the maximum number of steps by which a kernel may move to the front.
MAX_PARTS: Final = 32
MAX_ARRAYS: Final = 120
MAX_STATEMENTS: Final = 2000
REACH: Final = 48
#: Maximum number of elements of a block. If the last dimension is below `SHORT`, blocks are too small to pay, except for tensors
#: of up to `SMALL` elements.
LANES: Final = 4096
SHORT: Final = 8
SMALL: Final = 4096


def run(steps: Sequence[Step]) -> list[Step]:
    """Return the steps with kernels merged where they can run together."""
    found: list[Step | list[KernelStep]] = []
    for step in steps:
        # A kernel that reports violations numbers the lines of its own step, so it is not merged.
        if not isinstance(step, KernelStep) or STATUS in step.slots or not _fitting(step.kernel):
            found.append(step)
            continue
        at = _place(found, step)
        if at is None:
            found.append([step])
        else:
            batch = found[at]
            assert isinstance(batch, list)
            batch.append(step)
    return [_together(s) if isinstance(s, list) else s for s in found]


def _fitting(kernel: Kernel) -> bool:
    """Whether a kernel may be part of another: one element per point, and rows that are long enough."""
    if has_lanes(kernel) or kernel.scratch or any(not isinstance(s, _PLAIN) for s in walk(kernel.body)):
        return False
    total = math.prod(kernel.space)
    return total <= SMALL or kernel.space[-1] >= SHORT


_PLAIN: Final = (Const, Param, Apply, Load, Store)


def _place(found: Sequence[Step | list[KernelStep]], step: KernelStep) -> int | None:
    """Return the nearest batch that can take the step. The step must not depend on anything after that batch."""
    for at in range(len(found) - 1, max(len(found) - REACH, 0) - 1, -1):
        there = found[at]
        if isinstance(there, list) and _takes(there, step):
            return at
        for other in there if isinstance(there, list) else [there]:
            if not _independent(other, step):
                return None
    return None


def _takes(batch: Sequence[KernelStep], step: KernelStep) -> bool:
    together = [*batch, step]
    arrays = {(slot, a.dtype) for s in together for a, slot in zip(s.kernel.arrays, s.slots, strict=True)}
    scalars = {at for s in together for at in s.params}
    return (
        len(together) <= MAX_PARTS
        and len(arrays) + len(scalars) <= MAX_ARRAYS
        and sum(len(s.kernel.body) for s in together) <= MAX_STATEMENTS
        and all(_independent(other, step) and _one_type(other, step) for other in batch)
    )


def _one_type(one: KernelStep, other: KernelStep) -> bool:
    """Whether slots that both steps use have the same dtype in both."""
    kinds = {s: a.dtype for a, s in zip(one.kernel.arrays, one.slots, strict=True)}
    return all(kinds.get(s, a.dtype) is a.dtype for a, s in zip(other.kernel.arrays, other.slots, strict=True))


def _independent(one: Step, other: KernelStep) -> bool:
    """Whether the order of two steps does not matter."""
    lines = one.lines if isinstance(one, KernelStep) else (one.line,) if isinstance(one, LibraryStep) else ()
    written = {a.slot: line.origin for line in lines for a in line.accesses if a.role is not Role.IN}
    read = {a.slot for line in lines for a in line.accesses if a.role is not Role.OUT}
    for line in other.lines:
        for a in line.accesses:
            if a.slot in read and a.role is not Role.IN:
                return False
            # Parts of one instruction write different memory.
            if a.slot in written and not (a.role is Role.OUT and written[a.slot] == line.origin and line.part):
                return False
    return True


# -- one kernel of several -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of a part. Each has `lanes` elements; its last coordinates begin at `base` plus a multiple of `lanes`."""

    part: int
    outer: int
    along: int
    lanes: int
    base: int

    @property
    def count(self) -> int:
        return self.outer * self.along


def _blocks(part: int, space: tuple[int, ...]) -> list[_Blocks]:
    last = space[-1] if space else 1
    outer = math.prod(space[:-1])
    whole, rest = divmod(last, LANES)
    found = [_Blocks(part, outer, whole, LANES, 0)] if whole else []
    return [*found, _Blocks(part, outer, 1, rest, whole * LANES)] if rest else found


def _together(steps: Sequence[KernelStep]) -> KernelStep:
    """Return one step that does the work of several."""
    if len(steps) == 1:
        return steps[0]
    blocks = [b for part, s in enumerate(steps) for b in _blocks(part, s.kernel.space)]
    k = KernelBuilder(_name(steps), (sum(b.count for b in blocks),))
    slots: list[int] = []
    params: list[int] = []
    arrays = _arrays(k, steps, slots)
    scalars = _scalars(k, steps, params)
    _Writer(k, steps, arrays, scalars).tree(blocks, 0)
    lines = tuple(sorted([line for s in steps for line in s.lines], key=lambda line: (line.origin, line.part)))
    return KernelStep(k.finish(), tuple(slots), tuple(params), lines)


def _name(steps: Sequence[KernelStep]) -> str:
    words = re.sub(r"^k_", "", steps[0].kernel.name)
    return f"k_{len(steps)}_of_{words}"[:63]


def _arrays(k: KernelBuilder, steps: Sequence[KernelStep], slots: list[int]) -> list[dict[str, Array]]:
    """Return, per part, the merged kernel's array for each of its arrays."""
    roles: dict[tuple[int, DType], set[Role]] = {}
    sizes: dict[tuple[int, DType], int] = {}
    for step in steps:
        for a, slot in zip(step.kernel.arrays, step.slots, strict=True):
            key = slot, a.dtype
            roles.setdefault(key, set()).add(a.role)
            sizes[key] = max(sizes.get(key, 0), a.numel)
    made: dict[tuple[int, DType], Array] = {}
    for key, numel in sizes.items():
        role = next(iter(roles[key])) if len(roles[key]) == 1 else Role.INOUT
        made[key] = k.array(f"a{len(slots)}", key[1], numel, role)
        slots.append(key[0])
    return [{a.name: made[s, a.dtype] for a, s in zip(step.kernel.arrays, step.slots, strict=True)} for step in steps]


def _scalars(k: KernelBuilder, steps: Sequence[KernelStep], params: list[int]) -> list[dict[str, Scalar]]:
    """Return, per part, the merged kernel's scalar for each of its scalars."""
    made: dict[tuple[int, DType], Scalar] = {}
    found: list[dict[str, Scalar]] = []
    for step in steps:
        mine: dict[str, Scalar] = {}
        for s, at in zip(step.kernel.scalars, step.params, strict=True):
            if (at, s.dtype) not in made:
                made[at, s.dtype] = k.scalar(f"p{len(params)}", s.dtype)
                params.append(at)
            mine[s.name] = made[at, s.dtype]
        found.append(mine)
    return found


class _Writer:
    """Writes the parts into one kernel."""

    def __init__(
        self,
        k: KernelBuilder,
        steps: Sequence[KernelStep],
        arrays: Sequence[dict[str, Array]],
        scalars: Sequence[dict[str, Scalar]],
    ) -> None:
        self.k = k
        self.steps = steps
        self.arrays = arrays
        self.scalars = scalars

    def tree(self, blocks: Sequence[_Blocks], first: int) -> None:
        """Select the part of the current block by binary search, and write it."""
        if len(blocks) == 1:
            self.part(blocks[0], first)
            return
        half = len(blocks) // 2
        bound = first + sum(b.count for b in blocks[:half])
        k = self.k
        with k.when(k.apply("lt", k.points[0], k.const(DType.I64, bound))):
            self.tree(blocks[:half], first)
            k.otherwise()
            self.tree(blocks[half:], bound)

    def part(self, b: _Blocks, first: int) -> None:
        """Write the elements of a part's block. The block number is clamped: this changes no result, but proves that it is in
        range.
        """
        k, kernel = self.k, self.steps[b.part].kernel

        def number(n: int) -> Value:
            return k.const(DType.I64, n)

        block = k.apply("max", k.apply("sub", k.points[0], number(first)), number(0))
        block = k.apply("min", block, number(b.count - 1))
        coordinates: list[Value] = []
        rest = block if b.along == 1 else k.apply("div_trunc", block, number(b.along))
        for d in range(len(kernel.space) - 2, -1, -1):
            if d:
                coordinates.append(k.apply("fmod", rest, number(kernel.space[d])))
                rest = k.apply("div_trunc", rest, number(kernel.space[d]))
            else:
                coordinates.append(rest)
        coordinates.reverse()
        with k.lanes(b.lanes) as lane:
            if kernel.space:
                at = lane
                if b.along > 1:
                    start = k.apply("mul", k.apply("fmod", block, number(b.along)), number(b.lanes))
                    at = k.apply("add", start, lane)
                elif b.base:
                    at = k.apply("add", lane, number(b.base))
                coordinates.append(at)
            values = dict(zip(kernel.points, coordinates, strict=True))
            self.statements(kernel.body, values, b.part)

    def statements(self, block: Block, values: dict[int, Value], part: int) -> None:
        """Write a part's statements with the merged kernel's values."""
        k, arrays = self.k, self.arrays[part]
        for s in block:
            match s:
                case Const():
                    values[s.out] = k.const(s.dtype, s.value)
                case Param():
                    values[s.out] = k.param(self.scalars[part][s.name])
                case Apply():
                    values[s.out] = k.apply(s.op, *[values[a] for a in s.args], dtype=s.dtype)
                case Load():
                    mask = values[s.mask] if s.mask is not None else None
                    values[s.out] = k.load(arrays[s.array], values[s.index], mask, checked=s.checked)
                case Store():
                    mask = values[s.mask] if s.mask is not None else None
                    k.store(arrays[s.array], values[s.index], values[s.value], mask, checked=s.checked)
                case _:
                    raise AssertionError(f"{type(s).__name__} in a kernel of single elements")
