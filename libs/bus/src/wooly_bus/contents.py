"""Content ids: the BLAKE3 hash of the BLAKE3 hashes of all chunks. Client and executor compute them.

Reports about the contents of several tenants name each content by `shared_name`.

Chunks are hashed one by one, for two reasons: a sender hashes the next chunk while one is being sent, and the hash of the first
chunk already shows whether the executor may have the content.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from blake3 import blake3

#: Size of a chunk, in bytes.
CHUNK = 4 << 20
#: Size of a digest, in bytes.
DIGEST = 32
#: Minimum size, in bytes, of an upload with deduplication. For a smaller upload, asking the executor (one round trip) costs more
#: than sending the data.
MIN_OFFER_BYTES = 16 << 10


def chunk_digest(data: bytes | memoryview) -> bytes:
    """The digest of one chunk. The computation releases the GIL."""
    return blake3(data).digest()


def chunk_hasher() -> blake3:
    """A hash object whose digest is the `chunk_digest` of all that it was given, for data that comes in pieces."""
    return blake3()


def content_id(digests: Sequence[bytes], nbytes: int) -> bytes:
    """The id of a content.

    Args:
        digests: digests of the chunks, in order.
        nbytes: size of the content, in bytes.
    """
    return blake3(struct.pack("<Q", nbytes) + b"".join(digests)).digest()


def shared_name(content: bytes, tenant: str | None) -> str:
    """The name by which placement compares contents, in hexadecimal digits.

    Two names are equal only if the sessions may share the content. Otherwise a tenant could learn from the placement of its task
    that another tenant has the content.

    Args:
        content: id of the content.
        tenant: the tenant whose sessions share the content; None: all sessions that share publicly.
    """
    if tenant is None:
        return content.hex()
    return blake3(b"wooly circle\0" + tenant.encode() + b"\0" + content).hexdigest()
