"""Keys in text form, and signed claims."""

import pytest
from wooly_bus.keys import Key, KeyFormatError, SignatureError, public_bytes, unverified, verified

HEADER = {"typ": "test", "alg": "EdDSA"}
KINDS = {"operator": "O", "account": "A", "user": "U", "cluster": "C"}


@pytest.mark.parametrize(("kind", "letter"), KINDS.items())
def test_key_text_round_trips(kind, letter):
    key = Key.new(kind)
    assert key.public[0] == letter and key.seed[:2] == "S" + letter and len(key.public) == 56 and len(key.seed) == 58
    again = Key.read(f" {key.seed}\n", kind)
    assert (again.public, again.seed) == (key.public, key.seed)
    assert again.sign(b"x") == key.sign(b"x") and len(public_bytes(key.public, kind)) == 32


def test_key_of_other_kind_or_with_error_is_refused():
    key = Key.new("user")
    swapped = key.seed[:-1] + ("A" if key.seed[-1] != "A" else "E")
    for seed, kind in ((key.seed, "account"), (swapped, "user"), (key.public, "user"), ("", "user"), ("é", "user")):
        with pytest.raises(KeyFormatError):
            Key.read(seed, kind)
    with pytest.raises(KeyFormatError):
        public_bytes(key.public, "account")
    with pytest.raises(KeyFormatError):
        public_bytes(key.seed, "user")


def test_verified_other_key_or_header_raises():
    key, claims = Key.new("cluster"), {"a": [1, "é"], "b": None}
    token = key.claim(claims, HEADER)
    assert verified(token, key.public, "cluster", HEADER) == claims == unverified(token)
    with pytest.raises(SignatureError, match="not valid for the issuer's key"):
        verified(token, Key.new("cluster").public, "cluster", HEADER)
    with pytest.raises(SignatureError, match="with the expected header"):
        verified(token, key.public, "cluster", HEADER | {"alg": "none"})
    with pytest.raises(KeyFormatError):
        verified(token, key.public, "account", HEADER)


def test_verified_changed_character_raises():
    key = Key.new("cluster")
    token = key.claim({"a": 1}, HEADER)
    for at, character in enumerate(token):
        other = "A" if character != "A" else "B"
        with pytest.raises(SignatureError):
            verified(token[:at] + other + token[at + 1 :], key.public, "cluster", HEADER)
    for broken in ("", "..", token + ".", token[:-1], token + "=", "x" * (1 << 20)):
        with pytest.raises(SignatureError):
            verified(broken, key.public, "cluster", HEADER)
