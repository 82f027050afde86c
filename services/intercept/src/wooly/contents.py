"""Uploads whose content may be on the device already: asked for before they travel, hashed while they do.

The first chunk is hashed alone. If nobody on the device has a content that begins so, the chunks leave while another thread
hashes them, and the executor learns the whole's name at the end. If somebody has, the rest is hashed first, and the answer to its
name decides. So content that is new costs no pass of its own, and content that is there never travels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wooly_bus.contents import CHUNK, chunk_digest, content_id
from wooly_bus.supervision import start_call

if TYPE_CHECKING:
    from wooly.link import Link

#: Bytes from which on asking is cheaper than sending, which takes a round trip.
WORTH = 16 << 10


def upload(link: Link, buffer: int, data: memoryview) -> None:
    """Put `data` into a buffer, all of which it is, by sending it or by sharing what is there."""
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
        hashing.result()  # of all the data, or the buffer would be known by another's name
    link.seal(buffer, len(data), content_id(digests, len(data)))
