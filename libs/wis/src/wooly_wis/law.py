"""`Law`: the common type of the laws of forms, kernels, statements of kernels, plans, and the compiler's units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, ParamSpec

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Law(Generic[P]):
    """One law. The type argument gives the parameters of its check: `Law[[Form]]`, `Law[[Statement, Scope]]`.

    Attributes:
        name: one word; error messages contain it.
        says: the law in one sentence.
        check: returns a complaint if the arguments break the law, otherwise None.
    """

    name: str
    says: str
    check: Callable[P, str | None]
