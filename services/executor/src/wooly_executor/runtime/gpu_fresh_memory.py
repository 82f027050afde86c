"""On a GPU: what an operator may leave unwritten is zero (`fresh_memory`). The library's allocator has no switch for it there.

So such an operator takes its memory from a pool of its own, in which all that nobody holds is zeroed before each call. Where the
pool has to grow during a call, what it grew by holds anything: the call is made once more, and finds the pool large enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from wooly_executor.errors import OperationError

#: Calls of one instruction at most: each but the last finds that the pool had to grow.
ATTEMPTS: Final = 4


class Pool(Protocol):
    """A pool of device memory that only operators on zeroed memory take from."""

    def use(self) -> AbstractContextManager[Any]:
        """In the block, the library takes all memory from here, in whatever thread of its it computes."""
        ...

    def segments(self) -> dict[int, list[tuple[int, int]]]:
        """By address: what the pool has of the device; with (address, bytes) of the blocks in it that nobody holds."""
        ...

    def zero(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Zero memory, in order with what is enqueued."""
        ...


def on_zeros(call: Callable[[Any], Any], pool: Pool) -> Callable[[Any], Any]:
    """`call`, which may be made several times, with memory of `pool` that is zero."""

    def run(f: Any) -> Any:
        for _ in range(ATTEMPTS):
            before = pool.segments()
            for free in before.values():
                pool.zero(free)
            with pool.use():
                result = call(f)
            if pool.segments().keys() <= before.keys():
                return result
            del result  # back to the pool, to be zeroed
        raise OperationError(
            f"the library took more memory in each of {ATTEMPTS} calls of this operator: none began with all of it zeroed; "
            "use other operators, or a device of the host's"
        )

    return run
