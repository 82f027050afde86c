"""Compiled functions: the first call records a program, and later calls send this program again with other buffers.

A *kind* of arguments is everything about them except the buffers: layouts, shared storages, numbers, and which tensors require a
gradient. The first call of each kind runs eagerly and is recorded. A later call of the same kind sends one message, independent
of the number of operations. The results equal those of eager execution, because the instructions are the same. A function stays
eager if it reads a value of the device, computes on the host, or returns views of its arguments when a gradient is
needed.

This package does not depend on Dynamo. The caller must ensure that the function depends only on its arguments.
"""

from wooly.graphs.counters import counters
from wooly.graphs.function import KINDS_KEPT, GraphFunction

__all__ = ["KINDS_KEPT", "GraphFunction", "counters"]
