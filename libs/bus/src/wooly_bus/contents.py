"""What names a content: BLAKE3 of its chunks, and of these digests together. Both ends compute it.

Chunks are hashed one by one so that a sender can hash the next while one is on its way, and knows from the first whether asking
about the whole can be worth it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from blake3 import blake3

#: Bytes of a chunk.
CHUNK = 4 << 20
#: Bytes of a digest.
DIGEST = 32


def chunk_digest(data: bytes | memoryview) -> bytes:
    """The digest of one chunk. Other threads run meanwhile."""
    return blake3(data).digest()


def content_id(digests: Sequence[bytes], nbytes: int) -> bytes:
    """The name of a content of `nbytes` bytes from the digests of its chunks, in order."""
    return blake3(struct.pack("<Q", nbytes) + b"".join(digests)).digest()
