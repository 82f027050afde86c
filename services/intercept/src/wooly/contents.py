"""Uploads with deduplication: the client does not send content that the device already has.

The client first hashes only the first chunk and asks the executor about it:

- If the device has no content with this first chunk, the client sends the data. Another thread hashes the data at the same time,
  and the executor gets the digest of the whole content at the end.
- If the device has such content, the client hashes the rest first and asks about the digest of the whole content. The client
  sends the data only if the device does not have it.

So new content is sent without a separate hashing pass, and known content is never sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wooly_bus.contents import CHUNK, chunk_digest, content_id
from wooly_bus.supervision import start_call

if TYPE_CHECKING:
    from wooly.link import Link

#: Minimum size, in bytes, of an upload with deduplication. For a smaller upload, asking the executor (one round trip) costs more
#: than sending the data.
MIN_OFFER_BYTES = 16 << 10


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
