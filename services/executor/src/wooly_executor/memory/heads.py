"""First chunks of contents on the device, so that a client hashes a whole content only if its first chunk is known."""

from __future__ import annotations

from wooly_executor.memory.book import ContentId

#: Circle (None: the public circle), digest of the first chunk, size of the whole content in bytes.
Head = tuple[str | None, ContentId, int]


class Heads:
    """The first chunks of stores."""

    def __init__(self) -> None:
        self._count: dict[Head, int] = {}
        self._of: dict[int, Head] = {}

    def add(self, store: int, head: Head) -> None:
        """Add the first chunk of a store."""
        self._of[store] = head
        self._count[head] = self._count.get(head, 0) + 1

    def remove(self, store: int) -> None:
        """Remove a store; an unknown one is ignored."""
        head = self._of.pop(store, None)
        if head is not None:
            left = self._count[head] - 1
            if left:
                self._count[head] = left
            else:
                del self._count[head]

    def __contains__(self, head: Head) -> bool:
        return head in self._count
