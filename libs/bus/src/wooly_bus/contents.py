"""What names a content: BLAKE3 of its chunks, and of these digests together. Both ends compute it.

Where contents of several tenants are told of, each goes by its name in its circle (`name_in_circle`).

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


def name_in_circle(content: bytes, tenant: str | None) -> str:
    """What a content is called where placement compares contents, in hex.

    Two are equal only if their sessions could share them: who asks for a content that only another tenant has must not see, by
    where its task goes, that it is there.

    Args:
        content: its id.
        tenant: in whose circle it is; None: in the public one.
    """
    if tenant is None:
        return content.hex()
    return blake3(b"wooly circle\0" + tenant.encode() + b"\0" + content).hexdigest()
