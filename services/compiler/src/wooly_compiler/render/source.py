"""The result of printing a kernel: a source in one of two forms."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from wooly_wis.errors import WisError


class Form(Enum):
    """How points and lanes become work-items."""

    SIMT = "simt"
    LOOPS = "loops"


class RenderError(WisError):
    """The dialect cannot express a kernel."""

    code = "compiler.render"


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel's text in a dialect of C.

    Attributes:
        name: the kernel's entry point.
        dialect: name of the dialect.
        text: the source.
        groups: number of work-groups of a launch.
        threads: number of work-items of a group.
    """

    name: str
    dialect: str
    text: str
    groups: int
    threads: int
