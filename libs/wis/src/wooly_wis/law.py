"""What a law is: the same thing for forms, kernels, statements of kernels, plans, and the compiler's units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, ParamSpec

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Law(Generic[P]):
    """One law, of things of one kind: `Law[[Form]]`, `Law[[Statement, Scope]]`.

    Attributes:
        name: one word, which errors give.
        says: the law in a sentence.
        check: returns a complaint about a thing that breaks the law; None about all others.
    """

    name: str
    says: str
    check: Callable[P, str | None]
