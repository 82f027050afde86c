"""What a section is made of: cases, and which of them a process takes.

A section is a module of this folder with a function ``cases(selection)`` that yields the same cases, by the same names, on both
sides. It may ask neither Wooly nor torch.cuda outside of a case.
"""

import fnmatch
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

#: In the order in which they are printed. A further section is a module of this name here, and a line in this table. True: it has
#: work enough for several processes a side.
SECTIONS = {
    "operators": True,
    "autocast": False,
    "training": True,
    "facade": False,
    "errors": True,
    "compiled": False,
    "script": False,
}

UNKNOWN = object()


@dataclass(frozen=True)
class Raises:
    """What CUDA is known to raise: the exception's type and its text (a whole line of it)."""

    type: str
    text: str


@dataclass(frozen=True)
class Case:
    """One thing that is done on both sides.

    Attributes:
        name: a group, a slash, and what tells it from the group's others.
        run: does it on the device of this name ("cuda", or "cpu" for the truth of the CPU) and answers what is compared: tensors,
            numbers, strings, in lists and dictionaries.
        inputs: what it is done to: the sides must agree on it.
        known: for what the CPU cannot be asked: CUDA's answer as we know it. With a GPU at hand, it is checked as well.
        tolerances: dtype to (relative, absolute), where the usual ones do not fit.
        kind_only: the values are random or a matter of taste, and only dtypes and shapes count.
        exact_text: an exception's wording counts, not only its type and what sort of complaint it is.
    """

    name: str
    run: Callable[[str], Any]
    inputs: Any = None
    known: Any = UNKNOWN
    tolerances: dict[torch.dtype, tuple[float, float]] = field(default_factory=dict)
    kind_only: bool = False
    exact_text: bool = False

    @property
    def group(self):
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Selection:
    """Which groups of cases a process takes, and how many samples of each.

    Attributes:
        truth: "cuda" or "cpu".
        side: "truth" or "ours".
        samples: at most so many per group and dtype, where a section has any number of them.
        only: patterns of groups; empty: all.
        part, parts: this process takes every `parts`-th group.
    """

    truth: str
    side: str
    samples: int
    only: tuple[str, ...] = ()
    part: int = 0
    parts: int = 1

    @property
    def from_fakes(self):
        """Whether this process answers for CUDA without a GPU."""
        return self.side == "truth" and self.truth == "cpu"

    def takes(self, group):
        if zlib.crc32(group.encode()) % self.parts != self.part:
            return False
        return not self.only or any(fnmatch.fnmatchcase(group, pattern) for pattern in self.only)


#: What a complaint is about, where two libraries word it in their own ways.
COMPLAINTS = {
    "no kernel for the dtype": r"not (currently )?(implemented|supported) for|unsupported|(does not|not currently) support",
    "several devices": r"same device|on cpu|on cuda|at least two devices|different devices",
    "dtype": r"dtype|scalar type|\btype\b|can't be cast|floating point|Long|integer",
    "index": r"out of range|out of bounds|index|valid range",
    "shape": r"size|shape|dimension|\bdim\b|\d+-?D\b|elements|broadcast",
    "device": r"invalid device",
}


def complaint(text):
    """What sort of complaint an exception's text is: the first that fits, or its first words."""
    for kind, pattern in COMPLAINTS.items():
        if re.search(pattern, text, flags=re.IGNORECASE):
            return kind
    return " ".join(text.split()[:4])
