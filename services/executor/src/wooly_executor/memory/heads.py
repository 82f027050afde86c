"""First chunks of contents that are on the device: whether it is worth a client's while to hash the whole."""

from __future__ import annotations

from wooly_executor.memory.book import ContentId

#: Whose it is (None: everybody's), the first chunk, and the bytes of the whole.
Head = tuple[str | None, ContentId, int]


class Heads:
    """The heads of stores."""

    def __init__(self) -> None:
        self._count: dict[Head, int] = {}
        self._of: dict[int, Head] = {}

    def add(self, store: int, head: Head) -> None:
        """A store's content begins so."""
        self._of[store] = head
        self._count[head] = self._count.get(head, 0) + 1

    def remove(self, store: int) -> None:
        """A store is no more; one that is not known is ignored."""
        head = self._of.pop(store, None)
        if head is not None:
            left = self._count[head] - 1
            if left:
                self._count[head] = left
            else:
                del self._count[head]

    def __contains__(self, head: Head) -> bool:
        return head in self._count
