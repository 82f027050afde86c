"""What a rendering gives: a source, in one of two forms."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from wooly_wis.errors import WisError


class Form(Enum):
    """How points and lanes become work-items."""

    SIMT = "simt"
    LOOPS = "loops"


class RenderError(WisError):
    """A dialect has no words for a kernel."""

    code = "compiler.render"


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel's text in some C.

    Attributes:
        name: the kernel's entry point.
        dialect: which C.
        text: the source.
        groups: work-groups of a launch.
        threads: work-items of a group.
    """

    name: str
    dialect: str
    text: str
    groups: int
    threads: int
