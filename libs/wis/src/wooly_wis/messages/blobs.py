"""Bytes in a tenant's object store, and how they get there and back in pieces."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from wooly_wis.messages.base import Bytes, Count, Digest, Message, Name

#: Bytes of a blob that go into one message; in base64 and with what is around them, NATS carries it.
PIECE_BYTES = 512 << 10
Piece = Annotated[str, StringConstraints(max_length=PIECE_BYTES * 4 // 3 + 4)]


class Blob(Message):
    """Bytes in the tenant's object store, as the content of one tensor of a signature."""

    name: Name
    digest: Digest


class PutBlobRequest(Message):
    """One piece of a blob, for who has no JetStream. Said again, it changes nothing.

    A first message without `data` asks whether the blob is there already. Pieces come in order; the one that reaches `nbytes` has
    the router compare all of them with the digest, and keep the blob.

    Attributes:
        digest: what the blob will be called.
        nbytes: its size.
        upload: names this attempt; random, chosen by who sends it.
        offset: where in the blob `data` begins.
        after: what the reply to the piece before said.
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
    """`kept`: the whole blob is there. Otherwise the next piece is awaited, with this `after`."""

    kept: bool
    after: Count = 0


class GetBlobRequest(Message):
    """The next piece of a blob, for who has no JetStream. `after`: what the reply before said."""

    digest: Digest
    after: Count = 0
    tenant: Name | None = None


class GetBlobReply(Message):
    """A piece of a blob of `nbytes` in all, in base64. Who has put them together compares them with the digest."""

    nbytes: Bytes
    data: str
    after: Count
