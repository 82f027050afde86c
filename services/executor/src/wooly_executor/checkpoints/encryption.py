"""Encryption of checkpoints: from the secret of an installation to the stored bytes of chunks and lists.

HKDF derives from the secret, for each tenant: the name of the tenant's folder, a key for the names of chunks, a key for chunks,
and a key for lists (AES-256-GCM). The name of a chunk is a keyed hash of its content. So equal chunks of a tenant have one name,
and nobody can learn the content from the name without the key. The name of a chunk, and the session and number of a list, are
authenticated data: a chunk or list that was copied to the place of another is refused.

A trailer of 28 bytes follows each ciphertext: nonce (12), id of the key (8), `MAGIC` (8). The nonce of a chunk is the first 12
bytes of its name, so equal chunks are equal files. The nonce of a list is random.

Without a secret (`Plain`), names are digests, and the content is stored as it is.
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
#: The last bytes of each encrypted chunk and list: the format and its version.
MAGIC = b"WOOLYCP1"
NONCE, TAG, ID = 12, 16, 8
TRAILER = NONCE + ID + len(MAGIC)
#: Number of bytes that encryption adds to a content.
LONGER = TAG + TRAILER
#: The purpose of all derived keys. Another version of the format derives other keys.
PURPOSE = b"wooly checkpoints 1\0"
CHANGED = "{} is damaged: its bytes were changed, or are those of another chunk, checkpoint or tenant"

#: Bytes that are written one after the other.
Pieces = tuple[bytes | memoryview, ...]


class TenantCipher(Protocol):
    """How the chunks and lists of a tenant are named, encrypted and decrypted.

    Attributes:
        folder: name of the tenant's folder.
        longer: number of bytes that encryption adds to a chunk.
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
        """Encrypt a chunk. The result is valid until the thread's next call."""
        ...

    def decrypt_chunk(self, name: bytes, stored: memoryview, into: memoryview) -> None:
        """Decrypt a stored chunk to `into`. If `longer` is 0, `stored` may be `into` itself.

        Raises:
            CheckpointError: the stored bytes are not the chunk of this name.
        """
        ...

    def encrypt_list(self, session_id: str, number: int, text: bytes) -> Pieces:
        """Encrypt the list of a session's cut."""
        ...

    def decrypt_list(self, session_id: str, number: int, stored: bytes) -> bytes:
        """Decrypt the list of a session's cut.

        Raises:
            CheckpointError: the stored bytes are not the list of this cut.
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
        # Each thread uses one buffer again and again: allocating memory would add a quarter to the time of encryption.
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
        """Split stored bytes into the nonce and the ciphertext."""
        trailer = bytes(stored[-TRAILER:])
        if len(stored) < LONGER or not trailer.endswith(MAGIC):
            raise CheckpointError(f"{what} is damaged: it is not encrypted, or its end is missing")
        if trailer[NONCE:] != self._trailer:
            raise CheckpointError(f"{what} is encrypted with another key ({trailer[NONCE : NONCE + ID].hex()})")
        return trailer[:NONCE], stored[:-TRAILER]


class Secret:
    """The secret of an installation, from which the keys of all tenants are derived.

    Args:
        raw: its 32 bytes.

    Attributes:
        id: name of the secret. Nobody can learn the secret from it.
    """

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.raw_id = self.derived(b"id\0", ID)
        self.id = self.raw_id.hex()

    @classmethod
    def read(cls, text: str) -> Secret:
        """Read the secret from a text: 64 hexadecimal digits, 44 digits of base64, or the path of a file with one of these.

        Raises:
            ValueError: the text has none of these forms. The message does not contain it, because it may be a mistyped secret.
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
        """Derive a key for one purpose."""
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
    """Make the name of a folder from any text."""
    return chunk_digest(text.encode()).hex()[:32]
