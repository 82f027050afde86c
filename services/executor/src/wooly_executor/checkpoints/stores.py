"""What a place for checkpoints can do: a folder (`folder`) or an object store (`objects`). Neither knows what the bytes mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from wooly_executor.checkpoints.encryption import Pieces

T = TypeVar("T")
R = TypeVar("R")


class SessionStore(Protocol):
    """The place of one session: the chunks that its cuts need, which sessions of its tenant share, and one list per cut.

    Several threads may keep and fill chunks at a time; everything else is for one thread. All methods raise OSError or
    CheckpointError if the place has failed.
    """

    def keep(self, name: str, nbytes: int, content: Callable[[], Pieces]) -> None:
        """Store a chunk for this session. If the tenant has it already, `content` is not called.

        Args:
            name: name of the chunk.
            nbytes: size of its content.
            content: makes its bytes.
        """
        ...

    def fill(self, name: str, into: memoryview) -> int:
        """Fill `into` with a chunk. Returns the size of the chunk, which may differ from the size of `into`.

        Raises:
            FileNotFoundError: the session does not have the chunk.
        """
        ...

    def drop(self, names: Iterable[str]) -> None:
        """Give up chunks. Those that no session has any more are removed."""
        ...

    def lists(self) -> list[int]:
        """The numbers of the stored lists."""
        ...

    def put_list(self, number: int, content: Pieces) -> None:
        """Store a list, at once or not at all."""
        ...

    def get_list(self, number: int) -> bytes:
        """Read a list.

        Raises:
            FileNotFoundError: it is not stored.
        """
        ...

    def drop_lists(self, numbers: Iterable[int]) -> None:
        """Remove lists."""
        ...

    def touch(self) -> None:
        """Note that the session is open now, so that `Store.sweep` leaves it alone."""
        ...

    def remove(self) -> None:
        """Remove everything of the session."""
        ...


class Store(Protocol):
    """A place for checkpoints of all tenants. Several executors use it at the same time.

    Attributes:
        at_once: bytes that one call of `each` should process.
        read_at_once: bytes that one call of `read_each` should process.
    """

    at_once: int
    read_at_once: int

    def identity(self) -> str:
        """The name of the place: the same for all executors that use it."""
        ...

    def keyed(self, key: str) -> Store:
        """The same place, as executors with another key see it; `key`: id of the key."""
        ...

    def session(self, tenant: str, session: str) -> SessionStore:
        """The place of a session; `tenant` and `session` are names of folders."""
        ...

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Do `work` for each item, several at a time if the store gains by it. When this returns or raises, no work runs."""
        ...

    def read_each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Do the same as `each` for a session that waits for it, so as fast as possible."""
        ...

    def sweep(self, before: float) -> int:
        """Remove sessions that were not touched since a time. Returns the number of sessions."""
        ...

    def others(self) -> list[str]:
        """The ids of other keys with which something is stored here; "" for what is not encrypted."""
        ...

    def close(self) -> None:
        """End soon what runs."""
        ...
