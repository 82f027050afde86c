"""Ed25519 keys in NATS's written form (nkeys), and signed claims (JWT). Knows no network and keeps no files.

A key's kind is part of its written form, so that no key is taken for one of another purpose. Written form: base32 without padding
of a byte that names the kind (a seed has two), the 32 bytes, and their CRC-16.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from wooly_bus.errors import BusError

Kind = Literal["operator", "account", "user", "cluster"]
#: Their places in the base32 alphabet: O, A, U and C are the first letters of public keys.
_PREFIXES: dict[Kind, int] = {"operator": 14 << 3, "account": 0, "user": 20 << 3, "cluster": 2 << 3}
_KINDS = {prefix: kind for kind, prefix in _PREFIXES.items()}
_SEED = 18 << 3
#: Characters of the longest token that is looked at.
MAX_TOKEN = 16 << 10


class KeyFormatError(BusError):
    """A text is not a key of the kind that is needed."""

    code = "bus.key"


class SignatureError(BusError):
    """A token is malformed, or its signature is not its issuer's."""

    code = "bus.signature"


def _written(head: bytes, raw: bytes) -> str:
    data = head + raw
    return base64.b32encode(data + binascii.crc_hqx(data, 0).to_bytes(2, "little")).rstrip(b"=").decode()


def _read(text: str, size: int, what: str) -> bytes:
    try:
        data = base64.b32decode(text + "=" * (-len(text) % 8))
    except (binascii.Error, ValueError):
        data = b""
    if len(data) != size + 2 or binascii.crc_hqx(data[:-2], 0).to_bytes(2, "little") != data[-2:]:
        raise KeyFormatError(f"not {what}")
    return data[:-2]


class Key:
    """A private key of one kind.

    Attributes:
        kind: what it is for.
        public: its public part, written.
        seed: the key itself, written; a secret.
    """

    def __init__(self, kind: Kind, raw: bytes) -> None:
        self.kind: Kind = kind
        self._private = Ed25519PrivateKey.from_private_bytes(raw)
        prefix = _PREFIXES[kind]
        self.public = _written(bytes([prefix]), self._private.public_key().public_bytes_raw())
        self.seed = _written(bytes([_SEED | prefix >> 5, (prefix & 31) << 3]), raw)

    @classmethod
    def new(cls, kind: Kind) -> Key:
        """A key that nobody has."""
        return cls(kind, Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def read(cls, seed: str, kind: Kind) -> Key:
        """The key of a seed.

        Raises:
            KeyFormatError: it is not the seed of such a key.
        """
        data = _read(seed.strip(), 34, "a seed")
        prefix = (data[0] & 7) << 5 | data[1] >> 3
        if data[0] & 0xF8 != _SEED or _KINDS.get(prefix) != kind:
            raise KeyFormatError(f"not the seed of a key for {kind}s")
        return cls(kind, data[2:])

    def sign(self, data: bytes) -> bytes:
        """64 bytes."""
        return self._private.sign(data)

    def claim(self, claims: Mapping[str, Any], header: Mapping[str, str]) -> str:
        """A token that says `claims`, signed."""
        text = f"{_base64(_json(header))}.{_base64(_json(claims))}"
        return f"{text}.{_base64(self.sign(text.encode()))}"


def public_bytes(public: str, kind: Kind) -> bytes:
    """The 32 bytes of a written public key.

    Raises:
        KeyFormatError: it is not one of that kind.
    """
    data = _read(public, 33, "a public key")
    if _KINDS.get(data[0]) != kind:
        raise KeyFormatError(f"not a public key for {kind}s")
    return data[1:]


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _part(text: str) -> bytes:
    data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _base64(data) != text:  # one value, one way to write it
        raise ValueError(text)
    return data


def _object(text: str) -> dict[str, Any]:
    value = json.loads(_part(text))
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def unverified(token: str) -> dict[str, Any]:
    """What a token says, whoever wrote it: for who holds it, never for who is shown it.

    Raises:
        SignatureError: it is malformed.
    """
    try:
        return _object(token.split(".")[1])
    except (IndexError, ValueError, binascii.Error, RecursionError) as e:
        raise SignatureError("not a token") from e


def verified(token: str, public: str, kind: Kind, header: Mapping[str, str]) -> dict[str, Any]:
    """What a token says, if `public` signed it under exactly this header.

    Raises:
        KeyFormatError: `public` is not a key of that kind.
        SignatureError: it did not, or the token is malformed.
    """
    key = Ed25519PublicKey.from_public_bytes(public_bytes(public, kind))
    try:
        if len(token) > MAX_TOKEN:
            raise ValueError("too long")
        head, body, signature = token.split(".")
        if _object(head) != dict(header):
            raise ValueError("another header")
        key.verify(_part(signature), f"{head}.{body}".encode())
        return _object(body)
    except InvalidSignature as e:
        raise SignatureError("the signature is not its issuer's") from e
    except (ValueError, binascii.Error, RecursionError) as e:
        raise SignatureError("not a token of this kind") from e
