"""What a group of instructions computes per element: a graph of loads, operations, folds and stores over one index space.

The space is that of the group's largest tensors, its dimensions parted into outer ones (rows) and folded ones. A tensor of the
group either has an element per point of the whole space, or one per row.

Each value is rounded to its tensor's type even where the tensor itself never exists, so that a fused kernel has the bits of
the single ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from wooly_wis.dtypes import DType
from wooly_wis.kernel.ir import Number
from wooly_wis.kernel.ops import FLOATS, INTS, STORED, bounds
from wooly_wis.plan import PARAM_DTYPE, Line
from wooly_wis.program import Attr, ParamRef, View

from wooly_compiler.errors import UnsupportedError

#: Limits of one kernel: registers, arguments, the reader's patience.
MAX_NODES: Final = 512
MAX_SLOTS: Final = 24


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's elements lie.

    Attributes:
        slot: of the program.
        dtype: of the elements.
        strides: per dimension of the space, in elements; 0 where it does not move.
        offset: of the first element, in elements.
    """

    slot: int
    dtype: DType
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A value of the graph. `kind` is load, const, param, apply, fold, place, pick or guard.

    A `place` is the number of the element that a load there would read: coordinates. A `pick` is a load at a place that moves by
    another value, an index; where that is out of range another element is read, and the line complains. A `guard` is its first
    argument; the line complains where its second is true.

    Attributes:
        op: operation of an `apply`, combination of a `fold`.
        args: numbers of the nodes that it is made of.
        place: of a load or a place; of a pick where the index is 0.
        value: of a constant; of a param its index in the run; of a pick or a guard the line that complains, by its instruction.
        step: of a pick: elements from one index to the next.
        size: of a pick: indices from 0 to below this are in range.
    """

    kind: str
    dtype: DType
    op: str = ""
    args: tuple[int, ...] = ()
    place: Place | None = None
    value: Number = 0
    step: int = 0
    size: int = 0


#: The slot of a place that no tensor has.
NOWHERE: Final = -1


@dataclass(frozen=True, slots=True)
class Target:
    """Where along a dimension a put adds its elements up, which only the run knows.

    Attributes:
        index: the node that says where, an i64; elements whose index is out of range are left out.
        counts: the node that says which other elements are.
        step: elements from one index to the next.
        size: indices from 0 to below this are in range.
    """

    index: int
    counts: int
    step: int
    size: int


@dataclass(frozen=True, slots=True)
class Put:
    """A store: `rows` says that it has one element per row.

    With a `target`, it begins with zeros, and elements are added where the target says, in the order of the folded dimensions,
    each sum rounded to the type of the place.
    """

    place: Place
    node: int
    rows: bool
    target: Target | None = None

    @property
    def nodes(self) -> tuple[int, ...]:
        """What it is made of."""
        return (self.node,) if self.target is None else (self.node, self.target.index, self.target.counts)


@dataclass(slots=True)
class Graph:
    """What a group computes.

    Attributes:
        space: sizes of the largest tensors.
        folded: the dimensions that are folded along.
        params: the run's, where they are known.
        checks: whether kernels may complain of an index; without, what indexes is the library's.
        assumed: which of them the graph depends on, with their values.
        nodes: values, each after those that it is made of.
        puts: the last store to each slot.
    """

    space: tuple[int, ...]
    folded: frozenset[int] = frozenset()
    params: Sequence[Any] | None = None
    checks: bool = False
    assumed: dict[int, Any] = field(default_factory=dict)
    nodes: list[GraphNode] = field(default_factory=list)
    puts: dict[int, Put] = field(default_factory=dict)
    _known: dict[GraphNode, int] = field(default_factory=dict)

    def add(self, node: GraphNode) -> int:
        """The number of a node; equal nodes are one."""
        known = self._known.get(node)
        if known is None:
            known = self._known[node] = len(self.nodes)
            self.nodes.append(node)
        return known

    def copy(self) -> Graph:
        """A graph that can grow by itself."""
        return Graph(
            self.space,
            self.folded,
            self.params,
            self.checks,
            dict(self.assumed),
            list(self.nodes),
            dict(self.puts),
            dict(self._known),
        )

    def loads(self, slot: int) -> set[Place]:
        """The places from which a slot is loaded."""
        return {n.place for n in self.nodes if n.place is not None and n.place.slot == slot}

    @property
    def closed(self) -> bool:
        """Whether nothing else may be computed here: elements are added up by index."""
        return any(p.target is not None for p in self.puts.values())

    def picks(self, slot: int) -> bool:
        """Whether a slot is read at places that only the run knows."""
        return any(n.kind == "pick" and n.place is not None and n.place.slot == slot for n in self.nodes)

    def slots(self) -> set[int]:
        """All slots that are loaded from or stored to."""
        return {n.place.slot for n in self.nodes if n.place is not None} - {NOWHERE} | set(self.puts)

    @property
    def outer(self) -> tuple[int, ...]:
        """Sizes of the rows."""
        return tuple([n for d, n in enumerate(self.space) if d not in self.folded])

    @property
    def extent(self) -> int:
        """How many elements are folded into one."""
        return math.prod([self.space[d] for d in self.folded])


class Emitter:
    """Adds one line's values to a graph.

    Raises (all methods):
        UnsupportedError: no kernel can do this, or not within this graph.
    """

    def __init__(self, graph: Graph, line: Line) -> None:
        self.graph = graph
        self.line = line
        self.form = line.form

    # -- places ------------------------------------------------------------------------------------------------------

    def _strides(self, view: View, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """Strides over the space of a tensor that is used as one of `sizes`; whether it has one element per row only."""
        graph = self.graph
        lead = len(sizes) - len(view.sizes)
        wide = [0] * lead + [0 if n == 1 else s for n, s in zip(view.sizes, view.strides, strict=True)]
        if sizes == graph.space:
            return tuple(wide), False
        if graph.folded and sizes == tuple([1 if d in graph.folded else n for d, n in enumerate(graph.space)]):
            return tuple(wide), True
        if graph.folded and sizes == graph.outer:
            rest = iter(wide)
            return tuple([0 if d in graph.folded else next(rest) for d in range(len(graph.space))]), True
        raise UnsupportedError(f"sizes {list(sizes)} in a kernel over {list(graph.space)}")

    def place(self, slot: int, view: View, sizes: tuple[int, ...]) -> tuple[Place, bool]:
        """Where an operand lies."""
        if view.dtype not in STORED:
            raise UnsupportedError(f"kernels do not know {view.dtype.label}")
        strides, rows = self._strides(view, sizes)
        return Place(slot, view.dtype, strides, view.offset // view.dtype.itemsize), rows

    def read(self, k: int, sizes: tuple[int, ...]) -> int:
        """The element of operand `k`, used as a tensor of `sizes`."""
        view = self.form.operands[k].view
        assert view is not None
        place, _ = self.place(self.line.slots[k], view, sizes)
        put = self.graph.puts.get(place.slot)
        if put is not None:
            if put.place != place:
                raise UnsupportedError(f"slot {place.slot} is read otherwise than it was written")
            return put.node
        return self.graph.add(GraphNode("load", place.dtype, place=place))

    def write(self, k: int, node: int, sizes: tuple[int, ...]) -> None:
        """Operand `k` becomes a tensor of `sizes` with this element."""
        view = self.form.operands[k].view
        assert view is not None
        place, rows = self.place(self.line.slots[k], view, sizes)
        put = self.graph.puts.get(place.slot)
        if put is not None and put.place != place:
            raise UnsupportedError(f"slot {place.slot} is written in two ways")
        if any(p != place for p in self.graph.loads(place.slot)) or self.graph.picks(place.slot):
            raise UnsupportedError(f"slot {place.slot} is read otherwise than it is written")
        self.graph.puts[place.slot] = Put(place, self.to(node, place.dtype), rows)

    def add_up(self, k: int, strides: Sequence[int], node: int, target: Target) -> None:
        """Operand `k` becomes the sums of this element by where it belongs; `strides` are those of its other dimensions.

        It is the only store of its graph: in that order nothing else is computed.
        """
        view, slot = self.form.operands[k].view, self.line.slots[k]
        assert view is not None
        if view.dtype not in STORED:
            raise UnsupportedError(f"kernels do not know {view.dtype.label}")
        if self.graph.puts or self.graph.loads(slot):
            raise UnsupportedError("sums by index are a kernel of their own")
        place = Place(slot, view.dtype, tuple(strides), view.offset // view.dtype.itemsize)
        self.graph.puts[slot] = Put(place, node, False, target)

    # -- values ------------------------------------------------------------------------------------------------------

    def dtype(self, node: int) -> DType:
        return self.graph.nodes[node].dtype

    def const(self, dtype: DType, value: Number) -> int:
        if dtype in FLOATS:
            return self.graph.add(GraphNode("const", dtype, value=float(value)))
        if dtype is DType.BOOL:
            return self.graph.add(GraphNode("const", dtype, value=bool(value)))
        if dtype in INTS and value == value and abs(value) != math.inf and int(value) == value:
            low, high = bounds(dtype)
            if low <= value <= high:
                return self.graph.add(GraphNode("const", dtype, value=int(value)))
        raise UnsupportedError(f"{value!r} as {dtype.label}")

    def apply(self, op: str, *args: int, dtype: DType | None = None) -> int:
        return self.graph.add(GraphNode("apply", dtype or self.dtype(args[-1]), op, args))

    def to(self, node: int, dtype: DType) -> int:
        """The value in another type."""
        source = self.dtype(node)
        if source is dtype:
            return node
        halves = (DType.F16, DType.BF16)
        if source in halves and dtype is not DType.F32:
            node = self.apply("convert", node, dtype=DType.F32)
        if dtype in halves and self.dtype(node) is not DType.F32:
            if self.dtype(node) is DType.F64:
                raise UnsupportedError("f64 to 16 bits would be rounded twice")
            node = self.apply("convert", node, dtype=DType.F32)
        return self.apply("convert", node, dtype=dtype)

    def number(self, value: Attr, dtype: DType) -> int:
        """A number of the form or of the run."""
        if isinstance(value, ParamRef):
            kind = self.form.params[value.index]
            if kind not in PARAM_DTYPE:
                raise UnsupportedError("kernels have no complex numbers")
            param = GraphNode("param", PARAM_DTYPE[kind], value=self.line.first_param + value.index)
            return self.to(self.graph.add(param), dtype)
        if isinstance(value, (bool, int, float)):
            return self.const(dtype, value)
        raise UnsupportedError(f"{value!r} is no real number")

    def assume(self, value: Attr) -> Attr:
        """A number that decides what is computed: the run's, if it is known; then the kernel is for this number only."""
        params = self.graph.params
        if isinstance(value, ParamRef) and params is not None:
            index = self.line.first_param + value.index
            self.graph.assumed[index] = params[index]
            found: Attr = params[index]
            return found
        return value

    def fold(self, op: str, node: int) -> int:
        """The value folded along the folded dimensions; for `argmax` and `argmin`, which of them it is."""
        dtype = DType.I64 if op in ("argmax", "argmin") else self.dtype(node)
        return self.graph.add(GraphNode("fold", dtype, op, (node,)))

    def coordinate(self, dim: int) -> int:
        """The coordinate along a dimension of the space."""
        strides = tuple([int(d == dim) for d in range(len(self.graph.space))])
        return self.graph.add(GraphNode("place", DType.I64, place=Place(NOWHERE, DType.I64, strides, 0)))

    def guard(self, node: int, wrong: int) -> int:
        """The value; the line complains where `wrong` is true."""
        if not self.graph.checks:
            raise UnsupportedError(
                "the library complains of some operands, and nobody asks the kernel whether it would"
            )
        return self.graph.add(GraphNode("guard", self.dtype(node), args=(node, wrong), value=self.line.origin))

    def pick(self, k: int, strides: Sequence[int], step: int, size: int, index: int) -> int:
        """An element of operand `k`, along the dimension of `size` elements that lie `step` apart at the place of the index.

        Args:
            k: the operand.
            strides: of its other dimensions, per dimension of the space.
            step: elements from one index to the next.
            size: how many indices there are.
            index: an i64.
        """
        view, slot = self.form.operands[k].view, self.line.slots[k]
        assert view is not None
        if not self.graph.checks:
            raise UnsupportedError("an index may be out of range, and nobody asks the kernel whether it was")
        if slot in self.graph.puts:
            raise UnsupportedError(f"slot {slot} is read otherwise than it was written")
        if view.dtype not in STORED:
            raise UnsupportedError(f"kernels do not know {view.dtype.label}")
        place = Place(slot, view.dtype, tuple(strides), view.offset // view.dtype.itemsize)
        made = GraphNode("pick", view.dtype, args=(index,), place=place, value=self.line.origin, step=step, size=size)
        return self.graph.add(made)


_NEUTRAL: Final = {"add": 0, "max": -math.inf, "min": math.inf, "and": True, "or": False}


def neutral(op: str, dtype: DType) -> Number:
    """What a fold starts from."""
    op = op.removeprefix("arg")
    if dtype in INTS and op in ("max", "min"):
        return bounds(dtype)[0 if op == "max" else 1]
    return _NEUTRAL[op]
