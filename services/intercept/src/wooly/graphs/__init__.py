"""Functions of tensors as programs: recorded at the first call of a kind, sent again with other buffers at every later one.

A *kind* is everything about the arguments but the buffers: layouts, which of them share storage, numbers, who wants a gradient.
The first call of a kind runs as any eager code does, and what it recorded is kept; later calls cost one message, however many
operations there are. Results are those of eager execution, for they are the same instructions. A function that waits for the
device in its middle, computes on the host, or returns views of its arguments where a gradient is wanted, stays eager.

Knows nothing of Dynamo: whoever calls must see to it that the function depends on its arguments alone.
"""

from wooly.graphs.counters import counters
from wooly.graphs.function import KINDS_KEPT, GraphFunction

__all__ = ["KINDS_KEPT", "GraphFunction", "counters"]
