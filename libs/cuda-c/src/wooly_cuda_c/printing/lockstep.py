"""Which values grow evenly with the position of their thread in the block, and what follows for all threads at once.

If all accesses of a piece of code are to addresses that grow evenly, then the first and last threads tell whether all of them are
within bounds. The loop over the threads then needs no checks, and compilers can vectorize it. The same holds for comparisons.

A number may wrap on its way to an address, so that it grows evenly at the corners of the block and is anything between them. So
the conditions here also say that each growth is less than `LARGEST`, and that the computed numbers at the corners differ by the
exact growth. Growths are computed modulo 2^64, as `w_u64`: what wraps on the way to a growth is found by its size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final

from wooly_cuda_c.printing.arithmetic import COMPARISONS, operation
from wooly_cuda_c.printing.scope import literal
from wooly_cuda_c.printing.types import Scalar
from wooly_cuda_c.printing.values import Linear, Value

#: What stands for the position of a thread along x, y and z in a `Linear`'s text.
POSITION: Final = ("\x10", "\x11", "\x12")
#: Marks in a line of text: the number of an assumption, and a condition that is then true, or false.
TRUE, FALSE, THEN, END = "\x01", "\x03", "\x04", "\x02"
#: Marks an access that is within bounds under an assumption.
COVERED: Final = "/*c{}*/"
#: Maximum growth from a thread to the next one. With 1,024 threads along three dimensions, numbers grow by less than 2^48 in all.
LARGEST: Final = 1 << 36
#: Maximum length of a text that is repeated per corner.
MAX_TEXT: Final = 2000
_NOT: Final = {"<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "=="}
_MARKS: Final = f"{TRUE}{FALSE}{THEN}{END}"
_ASSUMED: Final = re.compile(f"([{TRUE}{FALSE}])([0-9]+){THEN}[^{_MARKS}]*{END}")
_MARK: Final = re.compile(f"[{TRUE}{FALSE}][0-9]+{THEN}|{END}|/\\*c[0-9]+\\*/")
_ACCESS: Final = re.compile(r"w_(load|store|update)_(\w+)\(w_status, w_shared, w_t/\*c([0-9]+)\*/, ")
#: What a region without checks must not contain: calls that may report a violation, loops, and jumps out of the region.
_FORBIDDEN: Final = re.compile(r"w_status|\b(for|while|do|switch|return)\b")
_NUMBER: Final = re.compile(r"-?[0-9]{1,9}")
_FLAT: Final = ("", "", "")


def uniform(text: str) -> Linear:
    """Return the `Linear` of a value that is equal in all threads."""
    return Linear(text, _FLAT, ())


def position(k: int) -> Linear:
    """Return the `Linear` of ``threadIdx`` along a dimension."""
    return Linear(f"((w_u32){POSITION[k]})", tuple(["1" if d == k else "" for d in range(3)]), ())  # type: ignore[arg-type]


def linear_of(value: Value) -> Linear | None:
    """Return what is known of a value; numbers are known without being told."""
    if value.linear is None and value.const is not None and isinstance(value.type, Scalar) and not value.type.real:
        return uniform(literal(value.type, value.const))
    return value.linear


def at(text: str, where: Sequence[int | str]) -> str:
    """Return a text at a position in the block."""
    for token, k in zip(POSITION, where, strict=True):
        text = text.replace(token, f"{k}u" if isinstance(k, int) else k)
    return text


def corners(block: Sequence[int], *values: Linear) -> Iterator[tuple[int, int, int]]:
    """Yield the positions of the threads with the extreme values, the first thread first."""
    grows = [any(v.slopes[d] for v in values) for d in range(3)]
    yield from product(*[(0, n - 1) if n > 1 and g else (0,) for n, g in zip(block, grows, strict=True)])


def exact(value: Linear, block: Sequence[int]) -> tuple[str, ...]:
    """Return the conditions under which a number grows evenly without wrapping."""
    if value.slopes == _FLAT:
        return value.checks
    first, *others = corners(block, value)
    found = [*value.checks, *_slow(value, block)]
    for corner in others:
        grown = " + ".join([f"(w_u64)({s}) * {k}u" for s, k in zip(value.slopes, corner, strict=True) if s and k])
        ends = [f"(w_u64)(w_i64){at(value.text, where)}" for where in (corner, first)]
        found.append(f"{ends[0]} - {ends[1]} == {grown}")
    return tuple(dict.fromkeys(found))


def _slow(value: Linear, block: Sequence[int]) -> Iterator[str]:
    """Yield the conditions under which a number grows by at most `LARGEST` from a thread to the next one."""
    for slope, n in zip(value.slopes, block, strict=True):
        if n > 1 and slope and not (_NUMBER.fullmatch(slope) and abs(int(slope)) <= LARGEST):
            yield f"(w_u64)({slope}) + (w_u64){LARGEST} <= (w_u64){2 * LARGEST}"


def _ordered(kind: Scalar, value: Linear, block: Sequence[int]) -> Iterator[str]:
    """Yield the conditions under which a number of 64 bits does not wrap between the corners, so that its order is theirs.

    Numbers of 32 bits need none: `exact` compares them in 64 bits.
    """
    if kind.size < 8 or value.slopes == _FLAT:
        return
    for text in [f"(w_u64){at(value.text, corner)}" for corner in corners(block, value)]:
        yield f"{text} + (w_u64){1 << 62} < (w_u64){1 << 63}u" if kind.signed else f"{text} < (w_u64){1 << 63}u"


def combined(op: str, kind: Scalar, a: Value, b: Value, block: Sequence[int]) -> tuple[Linear | None, str, str]:
    """Return what is known of an operation on integers: its `Linear`, and for a comparison when it is always or never true."""
    x, y = linear_of(a), linear_of(b)
    if x is None or y is None or kind.real or len(x.text) + len(y.text) > MAX_TEXT:
        return None, "", ""
    flat = x.slopes == y.slopes == _FLAT
    if op in COMPARISONS:
        if op in ("==", "!=") and not flat:
            return None, "", ""
        checks = (*exact(x, block), *exact(y, block), *_ordered(kind, x, block), *_ordered(kind, y, block))
        every = list(corners(block, x, y))
        always, never = [
            " && ".join([*checks, *[f"{at(x.text, c)} {sign} {at(y.text, c)}" for c in every]])
            for sign in (op, _NOT[op])
        ]
        return None, always, never
    text = operation(op, kind, x.text, y.text, b.const)
    checks = tuple(dict.fromkeys((*x.checks, *y.checks)))
    if flat:
        return Linear(text, _FLAT, checks), "", ""
    if op in ("+", "-"):
        slopes = tuple([_sum(s, t, op) for s, t in zip(x.slopes, y.slopes, strict=True)])
    elif op == "*" and _FLAT in (x.slopes, y.slopes):
        grows, still = (x, y) if y.slopes == _FLAT else (y, x)
        by = a.const if grows is y else b.const
        slopes = tuple([_times(s, f"(w_u64)(w_i64)({still.text})", by) for s in grows.slopes])
    else:
        return None, "", ""
    return Linear(text, slopes, checks), "", ""  # type: ignore[arg-type]


def _sum(a: str, b: str, op: str) -> str:
    if not b:
        return a
    if _NUMBER.fullmatch(b) and (not a or _NUMBER.fullmatch(a)):
        return str(int(a or 0) + (int(b) if op == "+" else -int(b)))
    return f"{a} {op} ({b})" if a else b if op == "+" else f"-({b})"


def _times(a: str, b: str, known: float | int | None) -> str:
    """Return a growth times a number in C, whose value may be known."""
    if a and known is not None and _NUMBER.fullmatch(a):
        return str(int(a) * int(known))
    return a and f"(w_u64)({a}) * {b}"


def converted(value: Value, kind: Scalar, block: Sequence[int]) -> Linear | None:
    """Return what is known of an integer in another type of at least 32 bits."""
    known, source = linear_of(value), value.type
    if known is None or not isinstance(source, Scalar) or source.real or kind.real or min(kind.size, source.size) < 4:
        return None
    checks = exact(known, block) if kind.size > source.size else known.checks
    return Linear(f"(({kind.text})({known.text}))", known.slopes, checks)


def moved(pointer: Value, by: Value, text: str, size: int, back: bool, block: Sequence[int]) -> Linear | None:
    """Return what is known of a pointer plus or minus an index of `size` bytes; `text` has ``{0}`` and ``{1}`` for both."""
    p, i = pointer.linear, linear_of(by)
    if p is None or i is None or len(p.text) + len(i.text) > MAX_TEXT:
        return None
    scaled = [_times(s, str(size), size) for s in i.slopes]
    slopes = tuple([_sum(s, t, "-" if back else "+") for s, t in zip(p.slopes, scaled, strict=True)])
    checks = tuple(dict.fromkeys((*p.checks, *exact(i, block))))
    return Linear(text.format(p.text, i.text), slopes, checks)  # type: ignore[arg-type]


def within(pointer: Linear, block: Sequence[int]) -> tuple[str, ...]:
    """Return the conditions under which all threads access memory within bounds.

    Addresses grow by less than 2^48 bytes in all, so that between corners within bounds all are within bounds.
    """
    bounds = [f"({t}).at < ({t}).n" for t in [at(pointer.text, c) for c in corners(block, pointer)]]
    return (*pointer.checks, *_slow(pointer, block), *bounds)


def unchecked(text: str) -> tuple[str, set[int]]:
    """Return the text of a region under its assumptions, and their numbers; an empty text if it must keep its checks."""
    used: set[int] = set()

    def assumed(found: re.Match[str]) -> str:
        used.add(int(found[2]))
        return "1" if found[1] == TRUE else "0"

    def near(found: re.Match[str]) -> str:
        used.add(int(found[3]))
        return f"w_near_{found[1]}_{found[2]}("

    while (made := _ASSUMED.sub(assumed, text)) != text:
        text = made
    text = _ACCESS.sub(near, text)
    return ("", set()) if _FORBIDDEN.search(text) else (text, used)


def plain(text: str) -> str:
    """Return the text of a region with its checks."""
    return _MARK.sub("", text)
