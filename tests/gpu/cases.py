"""The cases of a section, and the selection of cases for a process.

A section is a module of this folder. Its function ``cases(selection)`` yields the same cases, with the same names, on both
sides. Outside of a case, a section must not use Wooly or torch.cuda.
"""

import fnmatch
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

#: Sections in the order of the output. A further section is a module with this name in this folder, and a line in this table.
#: True: the section has enough work for several processes per side.
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
    """An exception that CUDA is known to raise: its type and its text (one whole line)."""

    type: str
    text: str


#: Variables of our side's process: the GPUs that its executors may see, and their runtime (cpu or cuda).
VISIBLE, RUNTIME = "GPU_CHECK_VISIBLE_DEVICES", "GPU_CHECK_RUNTIME"


@dataclass(frozen=True)
class Case:
    """One action that both sides perform.

    Attributes:
        name: the group, a slash, and a name inside the group.
        run: performs the action on the device with this name ("cuda", or "cpu" for the truth of the CPU) and returns what is
            compared: tensors, numbers and strings, in lists and dictionaries.
        inputs: the inputs of the action; both sides must have the same ones.
        known: CUDA's known answer, for actions that the CPU cannot perform. With a GPU, it is checked as well.
        tolerances: (relative, absolute) by dtype, if the usual ones do not fit.
        kind_only: only dtypes and shapes are compared, because the values are random or arbitrary.
        exact_text: the exact text of an exception is compared, not only its type and topic.
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
    """The groups of cases that a process runs, and the number of samples of each.

    Attributes:
        truth: "cuda" or "cpu".
        side: "truth" or "ours".
        samples: maximum number of samples per group and dtype, in sections with arbitrarily many.
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


#: Topics of error messages, for errors that two libraries word differently.
COMPLAINTS = {
    "no kernel for the dtype": r"not (currently )?(implemented|supported) for|unsupported|(does not|not currently) support",
    "several devices": r"same device|on cpu|on cuda|at least two devices|different devices",
    "dtype": r"dtype|scalar type|\btype\b|can't be cast|floating point|Long|integer",
    "index": r"out of range|out of bounds|index|valid range",
    "shape": r"size|shape|dimension|\bdim\b|\d+-?D\b|elements|broadcast",
    "device": r"invalid device",
}


def complaint(text):
    """The topic of an exception's text: the first matching topic, or the text's first words."""
    for kind, pattern in COMPLAINTS.items():
        if re.search(pattern, text, flags=re.IGNORECASE):
            return kind
    return " ".join(text.split()[:4])
