"""Parses memory quantities of Kubernetes."""

from __future__ import annotations

import re
from fractions import Fraction

MIB = 1 << 20
#: Smallest number of bytes that is refused: no device has so much memory, and the client has the same limit.
LIMIT = 1 << 63

_SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18} | {
    f"{letter}i": 1 << (10 * power) for power, letter in enumerate("KMGTPE", 1)
}
_QUANTITY = re.compile(r"(\d{1,20}(?:\.\d{1,9})?)([kMGTPE]i?|Ki)?", re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes of a quantity such as `8Gi`, `500M`, `1.5Gi` or `1073741824`, rounded up.

    Raises:
        ValueError: the text is not a quantity, or it is zero or larger than any device.
    """
    match = _QUANTITY.fullmatch(text.strip())
    suffix = (match[2] or "") if match else ""
    if match is None or suffix not in _SUFFIXES:
        raise ValueError(
            f"{text!r} is not a memory quantity; write a number of bytes, or a number with Ki, Mi, Gi, Ti, k, M, G or T"
        )
    exact = Fraction(match[1]) * _SUFFIXES[suffix]
    value = -(-exact.numerator // exact.denominator)
    if not 0 < value < LIMIT:
        raise ValueError(f"{text!r} is not between 1 byte and {LIMIT - 1} bytes")
    return value
