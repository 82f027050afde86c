"""Writes the kernel of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wooly_wis.kernel.ir import Kernel

from wooly_compiler.dag import Graph, Put
from wooly_compiler.schedule.columns import Columns
from wooly_compiler.schedule.nest import Nest, nest_of
from wooly_compiler.schedule.points import Points
from wooly_compiler.schedule.rows import Rows
from wooly_compiler.schedule.sums import Sums


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A kernel and its arguments.

    Attributes:
        kernel: the kernel.
        slots: slot of each array; `dag.NOWHERE` for the status.
        params: index of each scalar among the run's params.
    """

    kernel: Kernel
    slots: tuple[int, ...]
    params: tuple[int, ...]


def schedule(graph: Graph, puts: Sequence[Put], name: str, origins: Sequence[int] = ()) -> Scheduled:
    """Return the kernel of a group.

    Args:
        graph: what the group computes.
        puts: the stores to make; stores to temporaries of the group are left out.
        name: name of the kernel.
        origins: the instructions of the group in order, for numbering in reports of violations.
    """
    nest = nest_of(graph, puts)
    made = _form(graph, nest)(graph, puts, nest, name, origins)
    made.write()
    return Scheduled(made.k.finish(), tuple(made.slots), tuple(made.params))


def _form(graph: Graph, nest: Nest) -> type[Points | Rows | Columns | Sums]:
    if graph.closed:
        return Sums
    if not graph.folded:
        return Points
    return Columns if nest.width else Rows
