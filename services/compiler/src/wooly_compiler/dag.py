"""The graph of a fused group of instructions: loads, operations, folds and stores per element of one index space.

The index space has the sizes of the group's largest tensors. Some dimensions are outer ones (rows); the others are folded. A
tensor of the group has either one element per point of the space, or one per row.

Each value is rounded to its tensor's type, even if the tensor itself is never stored. So a fused kernel gives the same bits as
the single kernels.
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

#: Size limits of one kernel, so that registers and arguments suffice and the source stays readable: values, and slots.
MAX_NODES: Final = 512
MAX_SLOTS: Final = 24


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's elements are in a slot.

    Attributes:
        slot: number of the slot in the program.
        dtype: type of the elements.
        strides: in elements, per dimension of the space; 0 if the element does not depend on that dimension.
        offset: position of the first element, in elements.
    """

    slot: int
    dtype: DType
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A value of the graph. `kind` is load, const, param, apply, fold, place, pick or guard.

    A `place` is a coordinate: the number of the element that a load from this place would read. A `pick` is a load whose position
    also depends on another value, an index; if the index is out of range, the kernel reads another element and reports a
    violation. A `guard` has the value of its first argument; if its second argument is true, the kernel reports a violation.

    Attributes:
        op: operation of an `apply`, or combination of a `fold`.
        args: numbers of the nodes from which this value is computed.
        place: position of a load or place; position of a pick at index 0.
        value: of a constant, its number; of a param, its index in the run; of a pick or guard, the instruction that is reported.
        step: of a pick: elements between an index and the next.
        size: of a pick: valid indices are 0 to size - 1.
    """

    kind: str
    dtype: DType
    op: str = ""
    args: tuple[int, ...] = ()
    place: Place | None = None
    value: Number = 0
    step: int = 0
    size: int = 0


#: Slot number of a place that belongs to no tensor.
NOWHERE: Final = -1


@dataclass(frozen=True, slots=True)
class Target:
    """Where a `Put` adds elements along a dimension. Only the run knows this position.

    Attributes:
        index: node with the position, an i64. Elements whose index is out of range are left out.
        counts: node that is false for the other elements to leave out.
        step: elements between an index and the next.
        size: valid indices are 0 to size - 1.
    """

    index: int
    counts: int
    step: int
    size: int


@dataclass(frozen=True, slots=True)
class Put:
    """A store. `rows` says that the tensor has one element per row.

    With a `target`, the tensor starts with zeros. Each element is added where the target says, in the order of the folded
    dimensions, and each sum is rounded to the type of the place.
    """

    place: Place
    node: int
    rows: bool
    target: Target | None = None

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that the store reads."""
        return (self.node,) if self.target is None else (self.node, self.target.index, self.target.counts)


@dataclass(slots=True)
class Graph:
    """What a fused group computes.

    Attributes:
        space: sizes of the largest tensors.
        folded: dimensions along which values are folded.
        params: params of the run, if they are known.
        checks: whether kernels may report a bad index. If not, the library runs the operations that use an index.
        assumed: params on which the graph depends, with their values.
        nodes: values; each comes after its arguments.
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
        """Add a node and return its number. Equal nodes share one number."""
        known = self._known.get(node)
        if known is None:
            known = self._known[node] = len(self.nodes)
            self.nodes.append(node)
        return known

    def copy(self) -> Graph:
        """Return a copy that can grow without a change to this graph."""
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
        """The places at which a slot is loaded."""
        return {n.place for n in self.nodes if n.place is not None and n.place.slot == slot}

    @property
    def closed(self) -> bool:
        """Whether no instruction may be added: a graph that sums by index does nothing else."""
        return any(p.target is not None for p in self.puts.values())

    def picks(self, slot: int) -> bool:
        """Whether a slot is read at positions that only the run knows."""
        return any(n.kind == "pick" and n.place is not None and n.place.slot == slot for n in self.nodes)

    def slots(self) -> set[int]:
        """All slots that the graph loads or stores."""
        return {n.place.slot for n in self.nodes if n.place is not None} - {NOWHERE} | set(self.puts)

    @property
    def outer(self) -> tuple[int, ...]:
        """Sizes of the dimensions that are not folded."""
        return tuple([n for d, n in enumerate(self.space) if d not in self.folded])

    @property
    def extent(self) -> int:
        """Number of elements that one fold combines."""
        return math.prod([self.space[d] for d in self.folded])


class Emitter:
    """Adds the values of one line to a graph.

    Raises (all methods):
        UnsupportedError: no kernel can do this, or not within this graph.
    """

    def __init__(self, graph: Graph, line: Line) -> None:
        self.graph = graph
        self.line = line
        self.form = line.form

    # -- places ------------------------------------------------------------------------------------------------------

    def _strides(self, view: View, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """Return the strides over the space for a tensor used with `sizes`, and whether it has one element per row only."""
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
        raise UnsupportedError(f"an operand of sizes {list(sizes)} does not fit a kernel over {list(graph.space)}")

    def place(self, slot: int, view: View, sizes: tuple[int, ...]) -> tuple[Place, bool]:
        """Return where an operand's elements are, and whether it has one element per row only."""
        if view.dtype not in STORED:
            raise UnsupportedError(f"generated kernels do not support {view.dtype.label}")
        strides, rows = self._strides(view, sizes)
        return Place(slot, view.dtype, strides, view.offset // view.dtype.itemsize), rows

    def read(self, k: int, sizes: tuple[int, ...]) -> int:
        """Return the node for an element of operand `k`, used as a tensor of `sizes`."""
        view = self.form.operands[k].view
        assert view is not None
        place, _ = self.place(self.line.slots[k], view, sizes)
        put = self.graph.puts.get(place.slot)
        if put is not None:
            if put.place != place:
                raise UnsupportedError(f"slot {place.slot} is read with another layout than it was written with")
            return put.node
        return self.graph.add(GraphNode("load", place.dtype, place=place))

    def write(self, k: int, node: int, sizes: tuple[int, ...]) -> None:
        """Store this node as the elements of operand `k`, a tensor of `sizes`."""
        view = self.form.operands[k].view
        assert view is not None
        place, rows = self.place(self.line.slots[k], view, sizes)
        put = self.graph.puts.get(place.slot)
        if put is not None and put.place != place:
            raise UnsupportedError(f"slot {place.slot} is written with two layouts")
        if any(p != place for p in self.graph.loads(place.slot)) or self.graph.picks(place.slot):
            raise UnsupportedError(f"slot {place.slot} is read with another layout than it is written with")
        self.graph.puts[place.slot] = Put(place, self.to(node, place.dtype), rows)

    def add_up(self, k: int, strides: Sequence[int], node: int, target: Target) -> None:
        """Store sums by index: each element of `node` is added to operand `k` at the position that `target` gives.

        `strides` are those of the operand's other dimensions. This must be the only store of its graph, because it fixes the
        order.
        """
        view, slot = self.form.operands[k].view, self.line.slots[k]
        assert view is not None
        if view.dtype not in STORED:
            raise UnsupportedError(f"generated kernels do not support {view.dtype.label}")
        if self.graph.puts or self.graph.loads(slot):
            raise UnsupportedError("sums by index cannot share a kernel with other instructions")
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
        raise UnsupportedError(f"{dtype.label} cannot hold the constant {value!r}")

    def apply(self, op: str, *args: int, dtype: DType | None = None) -> int:
        return self.graph.add(GraphNode("apply", dtype or self.dtype(args[-1]), op, args))

    def to(self, node: int, dtype: DType) -> int:
        """Convert a value to another type."""
        source = self.dtype(node)
        if source is dtype:
            return node
        halves = (DType.F16, DType.BF16)
        if source in halves and dtype is not DType.F32:
            node = self.apply("convert", node, dtype=DType.F32)
        if dtype in halves and self.dtype(node) is not DType.F32:
            if self.dtype(node) is DType.F64:
                raise UnsupportedError("a conversion from f64 to 16 bits would round twice")
            node = self.apply("convert", node, dtype=DType.F32)
        return self.apply("convert", node, dtype=dtype)

    def number(self, value: Attr, dtype: DType) -> int:
        """Return the node for a number of the form or of the run."""
        if isinstance(value, ParamRef):
            kind = self.form.params[value.index]
            if kind not in PARAM_DTYPE:
                raise UnsupportedError("generated kernels do not support complex numbers")
            param = GraphNode("param", PARAM_DTYPE[kind], value=self.line.first_param + value.index)
            return self.to(self.graph.add(param), dtype)
        if isinstance(value, (bool, int, float)):
            return self.const(dtype, value)
        raise UnsupportedError(f"{value!r} is not a real number")

    def assume(self, value: Attr) -> Attr:
        """Return the run's value for a number that decides what is computed. The kernel is then valid for this value only.

        If the run's params are not known, return the number unchanged.
        """
        params = self.graph.params
        if isinstance(value, ParamRef) and params is not None:
            index = self.line.first_param + value.index
            self.graph.assumed[index] = params[index]
            found: Attr = params[index]
            return found
        return value

    def fold(self, op: str, node: int) -> int:
        """Fold a value along the folded dimensions; for `argmax` and `argmin`, return the position of the result."""
        dtype = DType.I64 if op in ("argmax", "argmin") else self.dtype(node)
        return self.graph.add(GraphNode("fold", dtype, op, (node,)))

    def coordinate(self, dim: int) -> int:
        """Return the coordinate along a dimension of the space."""
        strides = tuple([int(d == dim) for d in range(len(self.graph.space))])
        return self.graph.add(GraphNode("place", DType.I64, place=Place(NOWHERE, DType.I64, strides, 0)))

    def guard(self, node: int, wrong: int) -> int:
        """Return a node with the same value. The kernel reports a violation if `wrong` is true."""
        if not self.graph.checks:
            raise UnsupportedError(
                "the library rejects some operands, and this caller does not read a kernel's report of violations"
            )
        return self.graph.add(GraphNode("guard", self.dtype(node), args=(node, wrong), value=self.line.origin))

    def pick(self, k: int, strides: Sequence[int], step: int, size: int, index: int) -> int:
        """Return an element of operand `k` whose position along one dimension is an index.

        Args:
            k: number of the operand.
            strides: strides of the operand's other dimensions, per dimension of the space.
            step: elements between an index and the next.
            size: valid indices are 0 to size - 1.
            index: node with the index, an i64.
        """
        view, slot = self.form.operands[k].view, self.line.slots[k]
        assert view is not None
        if not self.graph.checks:
            raise UnsupportedError(
                "an index may be out of range, and this caller does not read a kernel's report of violations"
            )
        if slot in self.graph.puts:
            raise UnsupportedError(f"slot {slot} is read with another layout than it was written with")
        if view.dtype not in STORED:
            raise UnsupportedError(f"generated kernels do not support {view.dtype.label}")
        place = Place(slot, view.dtype, tuple(strides), view.offset // view.dtype.itemsize)
        made = GraphNode("pick", view.dtype, args=(index,), place=place, value=self.line.origin, step=step, size=size)
        return self.graph.add(made)


_NEUTRAL: Final = {"add": 0, "max": -math.inf, "min": math.inf, "and": True, "or": False}


def neutral(op: str, dtype: DType) -> Number:
    """Return the initial value of a fold."""
    op = op.removeprefix("arg")
    if dtype in INTS and op in ("max", "min"):
        return bounds(dtype)[0 if op == "max" else 1]
    return _NEUTRAL[op]
