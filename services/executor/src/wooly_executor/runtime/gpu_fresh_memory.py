"""Zeroes the memory on a GPU that an operator may leave unwritten (`fresh_memory`). The GPU allocator of torch has no switch for
this.

Such an operator allocates from a separate pool. All free memory of the pool is zeroed before each call. If the pool grows during
a call, the new memory is not zeroed, so the call is repeated, with a pool that is then large enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from wooly_executor.errors import OperationError

#: Maximum number of calls of one instruction. All but the last are repeated because the pool grew.
ATTEMPTS: Final = 4


class Pool(Protocol):
    """A pool of device memory for operators that need zeroed memory."""

    def use(self) -> AbstractContextManager[Any]:
        """Return a context in which the library allocates all memory from the pool, in each of its threads."""
        ...

    def segments(self) -> dict[int, list[tuple[int, int]]]:
        """Return the pool's segments by address, each with the (address, bytes) of its free blocks."""
        ...

    def zero(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Enqueue the zeroing of memory."""
        ...


def on_zeros(call: Callable[[Any], Any], pool: Pool) -> Callable[[Any], Any]:
    """Return `call` with an allocator that takes zeroed memory from `pool`. `call` may run several times."""

    def run(f: Any) -> Any:
        for _ in range(ATTEMPTS):
            before = pool.segments()
            for free in before.values():
                pool.zero(free)
            with pool.use():
                result = call(f)
            if pool.segments().keys() <= before.keys():
                return result
            del result  # the memory goes back to the pool, and is zeroed before the next call
        raise OperationError(
            f"the operator cannot run on zeroed memory: each of {ATTEMPTS} calls needed more memory than the one before; "
            "use other operators, or a CPU device"
        )

    return run
