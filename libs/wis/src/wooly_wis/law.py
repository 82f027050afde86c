"""A law: one type for the laws of forms, kernels, statements of kernels, plans, and the compiler's units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, ParamSpec

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Law(Generic[P]):
    """One law. Its type argument says what the check takes: `Law[[Form]]`, `Law[[Statement, Scope]]`.

    Attributes:
        name: one word; errors contain it.
        says: the law in one sentence.
        check: returns a complaint if its arguments break the law, else None.
    """

    name: str
    says: str
    check: Callable[P, str | None]
