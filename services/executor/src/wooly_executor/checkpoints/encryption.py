"""Encryption of checkpoints: the key of an installation, what it makes of a tenant, and the encrypted form of chunks and lists.

From the secret of the installation, HKDF derives for each tenant the name of its folder, a key for the names of chunks, and keys
for chunks and lists (AES-256-GCM). The name of a chunk is a keyed hash of its content: equal chunks of a tenant have one name,
and without the key the name says nothing about the content. A chunk is bound to its name, and a list to its session and number,
so that one that lies in the place of another is refused.

An encrypted text is followed by a trailer of 28 bytes: nonce (12), id of the key (8), `MAGIC` (8). The nonce of a chunk is the
beginning of its name, so equal chunks are equal files; the nonce of a list is random.

Without a secret (`Plain`), names are digests, and everything lies as it is.
"""

from __future__ import annotations

import base64
import binascii
import os
import threading
from pathlib import Path
from typing import Protocol

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from wooly_bus.contents import chunk_digest

from wooly_executor.errors import CheckpointError

#: Size of the secret and of each key, in bytes.
KEY = 32
#: The last bytes of everything that is encrypted: what it is, and the version of its form.
MAGIC = b"WOOLYCP1"
NONCE, TAG, ID = 12, 16, 8
TRAILER = NONCE + ID + len(MAGIC)
#: Bytes by which an encrypted text is longer than its content.
LONGER = TAG + TRAILER
#: What all keys are derived for. Another form of the files has other keys.
PURPOSE = b"wooly checkpoints 1\0"
CHANGED = "{} is damaged: it was changed, or belongs to another place or tenant"

#: Bytes that are written one after the other.
Pieces = tuple[bytes | memoryview, ...]


class TenantCipher(Protocol):
    """Names and forms of what a tenant stores.

    Attributes:
        folder: name of the tenant's folder.
        longer: bytes by which the stored form of a chunk is longer than the chunk.
    """

    folder: str
    longer: int

    def session_folder(self, session_id: str) -> str:
        """The name of a session's folder."""
        ...

    def name(self, data: memoryview) -> bytes:
        """The name of a chunk: 32 bytes."""
        ...

    def encrypt_chunk(self, name: bytes, data: memoryview) -> Pieces:
        """The stored form of a chunk, valid until the thread's next call."""
        ...

    def decrypt_chunk(self, name: bytes, stored: memoryview, into: memoryview) -> None:
        """Fill `into` with a chunk; `stored` may be `into` itself if `longer` is 0.

        Raises:
            CheckpointError: it is not the chunk of this name.
        """
        ...

    def encrypt_list(self, session_id: str, number: int, text: bytes) -> Pieces:
        """The stored form of the list of a session's cut."""
        ...

    def decrypt_list(self, session_id: str, number: int, stored: bytes) -> bytes:
        """The text of the list of a session's cut.

        Raises:
            CheckpointError: it is not the list of this cut.
        """
        ...


class Plain:
    """A tenant whose checkpoints are not encrypted. See `TenantCipher`."""

    longer = 0

    def __init__(self, tenant: str) -> None:
        self.folder = _folder(tenant)

    def session_folder(self, session_id: str) -> str:
        """See `TenantCipher`."""
        return _folder(session_id)

    def name(self, data: memoryview) -> bytes:
        """See `TenantCipher`."""
        return chunk_digest(data)

    def encrypt_chunk(self, name: bytes, data: memoryview) -> Pieces:
        """See `TenantCipher`."""
        return (data,)

    def decrypt_chunk(self, name: bytes, stored: memoryview, into: memoryview) -> None:
        """See `TenantCipher`."""
        if chunk_digest(stored) != name:
            raise CheckpointError("a chunk of the checkpoint is damaged")

    def encrypt_list(self, session_id: str, number: int, text: bytes) -> Pieces:
        """See `TenantCipher`."""
        return (text,)

    def decrypt_list(self, session_id: str, number: int, stored: bytes) -> bytes:
        """See `TenantCipher`."""
        return stored


class Encrypted:
    """A tenant whose checkpoints are encrypted. See `TenantCipher`.

    Args:
        secret: the secret of the installation.
        tenant: the tenant.
    """

    longer = LONGER

    def __init__(self, secret: Secret, tenant: str) -> None:
        self._trailer = secret.raw_id + MAGIC
        self.folder = secret.derived(b"folder\0" + tenant.encode(), 16).hex()
        keys = secret.derived(b"tenant\0" + tenant.encode(), 3 * KEY)
        self._names = keys[:KEY]
        self._buffers = threading.local()
        self._chunks, self._lists = AESGCM(keys[KEY : 2 * KEY]), AESGCM(keys[2 * KEY :])

    def session_folder(self, session_id: str) -> str:
        """See `TenantCipher`."""
        return blake3(b"session\0" + session_id.encode(), key=self._names).hexdigest()[:32]

    def name(self, data: memoryview) -> bytes:
        """See `TenantCipher`."""
        return blake3(data, key=self._names).digest()

    def encrypt_chunk(self, name: bytes, data: memoryview) -> Pieces:
        """See `TenantCipher`."""
        # A buffer that is used again: fresh memory would cost a quarter of the time of encryption.
        nonce, size = name[:NONCE], len(data) + TAG
        held = getattr(self._buffers, "held", b"")
        if len(held) < size:
            held = self._buffers.held = bytearray(size)
        into = memoryview(held)[:size]
        self._chunks.encrypt_into(nonce, data, name, into)
        return into, nonce + self._trailer

    def decrypt_chunk(self, name: bytes, stored: memoryview, into: memoryview) -> None:
        """See `TenantCipher`."""
        what = "a chunk of the checkpoint"
        nonce, text = self._opened(what, stored)
        try:
            self._chunks.decrypt_into(nonce, text, name, into)
        except InvalidTag as e:
            raise CheckpointError(CHANGED.format(what)) from e

    def encrypt_list(self, session_id: str, number: int, text: bytes) -> Pieces:
        """See `TenantCipher`."""
        nonce = os.urandom(NONCE)
        return self._lists.encrypt(nonce, text, _place(session_id, number)), nonce + self._trailer

    def decrypt_list(self, session_id: str, number: int, stored: bytes) -> bytes:
        """See `TenantCipher`."""
        what = f"the list of checkpoint {number}"
        nonce, text = self._opened(what, memoryview(stored))
        try:
            return self._lists.decrypt(nonce, text, _place(session_id, number))
        except InvalidTag as e:
            raise CheckpointError(CHANGED.format(what)) from e

    def _opened(self, what: str, stored: memoryview) -> tuple[bytes, memoryview]:
        """The nonce and the encrypted text of something that is stored."""
        trailer = bytes(stored[-TRAILER:])
        if len(stored) < LONGER or not trailer.endswith(MAGIC):
            raise CheckpointError(f"{what} is damaged: it is not encrypted, or not complete")
        if trailer[NONCE:] != self._trailer:
            raise CheckpointError(f"{what} is encrypted with another key ({trailer[NONCE : NONCE + ID].hex()})")
        return trailer[:NONCE], stored[:-TRAILER]


class Secret:
    """The secret of an installation, from which the keys of all tenants are derived.

    Args:
        raw: its 32 bytes.

    Attributes:
        id: name of the secret; it says nothing about its bytes.
    """

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.raw_id = self.derived(b"id\0", ID)
        self.id = self.raw_id.hex()

    @classmethod
    def read(cls, text: str) -> Secret:
        """Take the secret from a text: 64 hexadecimal digits, 44 digits of base64, or the path of a file with either.

        Raises:
            ValueError: the text is none of these. The message does not contain the text, which may be a mistyped secret.
            OSError: the file cannot be read.
        """
        raw = _parsed(text.strip())
        if raw is None and (text.startswith(("/", ".", "~"))):
            path = Path(text).expanduser()
            raw = _parsed(path.read_text(errors="replace").strip())
            if raw is None:
                raise ValueError(
                    f"the file {path} does not contain a key: 64 hexadecimal digits, or 32 bytes in base64"
                )
        if raw is None:
            raise ValueError(
                "it is neither a key (64 hexadecimal digits, or 32 bytes in base64) nor the path of a file"
            )
        return cls(raw)

    def derived(self, purpose: bytes, size: int) -> bytes:
        """A key for one purpose."""
        return HKDF(SHA256(), size, None, PURPOSE + purpose).derive(self._raw)


def _parsed(text: str) -> bytes | None:
    try:
        raw = bytes.fromhex(text) if len(text) == 2 * KEY else base64.b64decode(text, altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        return None
    return raw if len(raw) == KEY and len(text) in (2 * KEY, 44) else None


def _place(session_id: str, number: int) -> bytes:
    return number.to_bytes(8, "little") + session_id.encode()


def _folder(text: str) -> str:
    """The name of a folder for any text."""
    return chunk_digest(text.encode()).hex()[:32]
