"""Uploads with deduplication: the client does not send content that the device already has.

The client first hashes only the first chunk and asks the executor about it:

- If the device has no content with this first chunk, the client sends the data. Another thread hashes the data at the same time,
  and the executor gets the digest of the whole content at the end.
- If the device has such content, the client hashes the rest first and asks about the digest of the whole content. The client
  sends the data only if the device does not have it.

So new content is sent without a separate hashing pass, and known content is never sent. Only uploads that look like weights are
offered (`OfferPolicy`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wooly_bus.contents import CHUNK, chunk_digest, content_id
from wooly_bus.supervision import start_call

if TYPE_CHECKING:
    from wooly.link import Link


#: How many more uploads into buffers that were filled before, than into new ones, stop the offers.
MOST_REFILLS = 16
#: Number of buffers that a policy remembers.
_REMEMBERED = 4096


class OfferPolicy:
    """Decides which uploads of a session are offered.

    An offer waits for the device's answer, and new content is hashed on both sides. For weights this pays, because they stay and
    are equal in many sessions. For the batches of a training it does not. Weights go into new buffers. The buffers of batches are
    freed and their ids are used again, or the program fills the same buffers again. So an upload into a buffer that was filled
    twice before is a refill, and `MOST_REFILLS` more refills than other uploads stop the offers, until other uploads outweigh
    the refills. A second filling does not count: weights are often initialized first and loaded then.
    """

    def __init__(self) -> None:
        self._filled: dict[int, int] = {}
        self._refills = 0

    def accepts(self, buffer: int) -> bool:
        """Note an upload of a whole buffer, and decide whether it is offered."""
        filled = self._filled
        times = filled.get(buffer, 0)
        if not times and len(filled) >= _REMEMBERED:
            del filled[next(iter(filled))]
        filled[buffer] = times + 1
        if times >= 2:
            self._refills = min(self._refills + 1, 2 * MOST_REFILLS)
        else:
            self._refills = max(self._refills - 1, 0)
        return self._refills < MOST_REFILLS


def upload(link: Link, buffer: int, data: memoryview) -> None:
    """Set the whole content of a buffer to `data`: share content that the device has, or send the data."""
    n = len(data)
    digests = [chunk_digest(data[:CHUNK])]
    if n > CHUNK and not link.offer(buffer, n, digests[0], head=True):
        _send_and_hash(link, buffer, data, digests)
        return
    _hash_rest(data, digests)
    name = content_id(digests, n)
    if link.offer(buffer, n, name, head=False):
        return
    link.write(buffer, 0, data)
    link.seal(buffer, n, name)


def _hash_rest(data: memoryview, digests: list[bytes]) -> None:
    for at in range(CHUNK, len(data), CHUNK):
        digests.append(chunk_digest(data[at : at + CHUNK]))


def _send_and_hash(link: Link, buffer: int, data: memoryview, digests: list[bytes]) -> None:
    hashing = start_call(lambda: _hash_rest(data, digests), "wooly-hashing")
    try:
        link.write(buffer, 0, data)
    finally:
        hashing.result()  # the digest must cover all of the data
    link.seal(buffer, len(data), content_id(digests, len(data)))
