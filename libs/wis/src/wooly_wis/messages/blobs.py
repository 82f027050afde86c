"""Blobs in a tenant's object store, and their transfer in pieces."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from wooly_wis.messages.base import Bytes, Count, Digest, Message, Name

#: Maximum number of bytes of a blob in one message. In base64, with the other fields, they fit into one NATS message.
PIECE_BYTES = 512 << 10
Piece = Annotated[str, StringConstraints(max_length=PIECE_BYTES * 4 // 3 + 4)]


class Blob(Message):
    """A named blob in the tenant's object store: the content of one tensor of a module's signature."""

    name: Name
    digest: Digest


class PutBlobRequest(Message):
    """Store one piece of a blob, for clients without JetStream. A repeated message has no further effect.

    A first message without `data` asks whether the blob exists already. Pieces are sent in order. At the last piece, the router
    compares the whole blob with the digest, and stores the blob.

    Attributes:
        digest: digest of the blob, which is its name.
        nbytes: size of the blob in bytes.
        upload: random id of this upload, chosen by the client.
        offset: byte offset of `data` in the blob.
        after: value of `after` in the reply to the previous piece.
        data: base64 of at most `PIECE_BYTES`.
    """

    digest: Digest
    nbytes: Bytes
    upload: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]{16,64}$")]
    offset: Bytes = 0
    after: Count = 0
    data: Piece = ""
    tenant: Name | None = None


class PutBlobReply(Message):
    """`kept`: the whole blob is stored. Otherwise the router expects the next piece, with this value of `after`."""

    kept: bool
    after: Count = 0


class GetBlobRequest(Message):
    """Read the next piece of a blob, for clients without JetStream. `after`: value from the previous reply; 0 for the first
    piece.
    """

    digest: Digest
    after: Count = 0
    tenant: Name | None = None


class GetBlobReply(Message):
    """A piece of a blob in base64; the blob has `nbytes` bytes in total. The client compares the whole blob with the digest."""

    nbytes: Bytes
    data: str
    after: Count
