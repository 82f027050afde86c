"""Uploads with deduplication: the client does not send content that the device already has.

The client first hashes only the first chunk and asks the executor about it:

- If the device has no content with this first chunk, the client sends the data. Another thread hashes the data at the same time,
  and the executor gets the digest of the whole content at the end.
- If the device has such content, the client hashes the rest first and asks about the digest of the whole content. The client
  sends the data only if the device does not have it.

So new content is sent without a separate hashing pass, and known content is never sent. Only uploads that look like weights are
offered (`OfferPolicy`). Over a distant connection, content that is sent in the time of a few questions is not offered, but sent.
When it is sealed, the executor shares its memory all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from wooly_bus.contents import CHUNK, chunk_digest, content_id
from wooly_bus.supervision import start_call

if TYPE_CHECKING:
    from wooly.link import Link


#: A connection is assumed to send so many bytes per second (100 Mbit/s).
ASSUMED_RATE = 12_500_000
#: Content that is sent in the time of so many round trips is not offered. So offers add at most half to the time of an upload.
TRIPS_OF_SMALL = 2
#: How many more refills than other uploads stop the offers.
MOST_REFILLS = 16
#: An upload is a refill if so many of the last uploads of its size, of so many, are gone from the device.
GONE, WINDOW = 4, 8
#: Number of sizes that a policy remembers.
_REMEMBERED = 4096


class OfferPolicy:
    """Decides which uploads of a session are offered.

    An offer waits for the device's answer, and new content is hashed on both sides. For weights this pays, because they stay and
    are equal in many sessions. For the batches of a training it does not: when the next batch comes, the ones before it are
    freed, or it goes into the same buffer. So an upload is a refill if earlier uploads of the same size are gone (`GONE` of the
    last `WINDOW`). `MOST_REFILLS` more refills than other uploads stop the offers, until other uploads outweigh the refills.
    """

    def __init__(self) -> None:
        #: By size in bytes: the buffers of the last uploads; None for those whose content is gone.
        self._last: dict[int, deque[int | None]] = {}
        self._refills = 0

    def accepts(self, buffer: int, nbytes: int, free: Iterable[int]) -> bool:
        """Note an upload of a whole buffer, and decide whether it is offered.

        Args:
            buffer: id of the buffer.
            nbytes: its size.
            free: ids of the buffers that are freed and not allocated again.
        """
        last = self._last.get(nbytes)
        if last is None:
            if len(self._last) >= _REMEMBERED:
                del self._last[next(iter(self._last))]
            last = self._last[nbytes] = deque(maxlen=WINDOW)
        known = {b for b in last if b is not None}
        gone = known.intersection(free) | (known & {buffer})
        if gone:
            last = self._last[nbytes] = deque([None if b in gone else b for b in last], WINDOW)
        refill = last.count(None) >= GONE
        last.append(buffer)
        if refill:
            self._refills = min(self._refills + 1, 2 * MOST_REFILLS)
        else:
            self._refills = max(self._refills - 1, 0)
        return self._refills < MOST_REFILLS


def upload(link: Link, buffer: int, data: memoryview) -> None:
    """Set the whole content of a buffer to `data`: share content that the device has, or send the data."""
    n = len(data)
    if not link.waits.near and n <= min(CHUNK, TRIPS_OF_SMALL * link.waits.trip_s * ASSUMED_RATE):
        link.write(buffer, 0, data)
        link.seal(buffer, n, content_id([chunk_digest(data)], n))
        return
    digests = [chunk_digest(data[:CHUNK])]
    if n > CHUNK and not link.offer(buffer, n, digests[0], head=True):
        _send_and_hash(link, buffer, data, digests)
        return
    _hash_rest(data, digests)
    name = content_id(digests, n)
    if link.offer(buffer, n, name, head=False):
        link.keep_content(buffer, data)
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
