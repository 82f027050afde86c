"""Ed25519 keys in the text form of NATS (nkeys), and signed claims (JWT). This module uses no network and no files.

The text of a key contains its kind, so that a key cannot be used for the purpose of another kind. The text is base32 without
padding of: one byte for the kind (a seed has two), the 32 bytes of the key, and a CRC-16 of both.
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
#: First byte of a public key, by kind. Its upper 5 bits make the first letter of the text: O, A, U or C.
_PREFIXES: dict[Kind, int] = {"operator": 14 << 3, "account": 0, "user": 20 << 3, "cluster": 2 << 3}
_KINDS = {prefix: kind for kind, prefix in _PREFIXES.items()}
_SEED = 18 << 3
#: Longest token that is verified, in characters.
MAX_TOKEN = 16 << 10


class KeyFormatError(BusError):
    """A text is not a key of the required kind."""

    code = "bus.key"


class SignatureError(BusError):
    """A token is malformed, or its signature is not valid for the issuer's key."""

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
        raise KeyFormatError(f"the text is not {what}: wrong length, alphabet or checksum")
    return data[:-2]


class Key:
    """A private key of one kind.

    Attributes:
        kind: purpose of the key.
        public: text of the public key.
        seed: text of the private key; a secret.
    """

    def __init__(self, kind: Kind, raw: bytes) -> None:
        self.kind: Kind = kind
        self._private = Ed25519PrivateKey.from_private_bytes(raw)
        prefix = _PREFIXES[kind]
        self.public = _written(bytes([prefix]), self._private.public_key().public_bytes_raw())
        self.seed = _written(bytes([_SEED | prefix >> 5, (prefix & 31) << 3]), raw)

    @classmethod
    def new(cls, kind: Kind) -> Key:
        """Generate a random key."""
        return cls(kind, Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def read(cls, seed: str, kind: Kind) -> Key:
        """Parse the seed of a key.

        Raises:
            KeyFormatError: the text is not the seed of a key of this kind.
        """
        data = _read(seed.strip(), 34, "a seed")
        prefix = (data[0] & 7) << 5 | data[1] >> 3
        if data[0] & 0xF8 != _SEED or _KINDS.get(prefix) != kind:
            raise KeyFormatError(f"the text is a seed, but not of a key for {kind}s")
        return cls(kind, data[2:])

    def sign(self, data: bytes) -> bytes:
        """The signature of `data`: 64 bytes."""
        return self._private.sign(data)

    def claim(self, claims: Mapping[str, Any], header: Mapping[str, str]) -> str:
        """A signed token (JWT) with these claims."""
        text = f"{_base64(_json(header))}.{_base64(_json(claims))}"
        return f"{text}.{_base64(self.sign(text.encode()))}"


def public_bytes(public: str, kind: Kind) -> bytes:
    """The 32 bytes of a public key in text form.

    Raises:
        KeyFormatError: the text is not a public key of this kind.
    """
    data = _read(public, 33, "a public key")
    if _KINDS.get(data[0]) != kind:
        raise KeyFormatError(f"the text is a public key, but not for {kind}s")
    return data[1:]


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _part(text: str) -> bytes:
    data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _base64(data) != text:  # refuse other encodings of the same value
        raise ValueError(text)
    return data


def _object(text: str) -> dict[str, Any]:
    value = json.loads(_part(text))
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def unverified(token: str) -> dict[str, Any]:
    """The claims of a token without verification. Use this only for your own token, never for a token that a client sent.

    Raises:
        SignatureError: the token is malformed.
    """
    try:
        return _object(token.split(".")[1])
    except (IndexError, ValueError, binascii.Error, RecursionError) as e:
        raise SignatureError("the text is not a token (JWT)") from e


def verified(token: str, public: str, kind: Kind, header: Mapping[str, str]) -> dict[str, Any]:
    """Verify a token, and return its claims.

    Args:
        token: the token.
        public: public key of the issuer.
        kind: required kind of the key.
        header: the exact header that the token must have.

    Raises:
        KeyFormatError: `public` is not a key of this kind.
        SignatureError: the token is malformed, or the issuer did not sign it with this header.
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
        raise SignatureError("the signature is not valid for the issuer's key") from e
    except (ValueError, binascii.Error, RecursionError) as e:
        raise SignatureError("the text is not a token (JWT) with the expected header") from e
