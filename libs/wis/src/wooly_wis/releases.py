"""Which releases of PyTorch work together. The client has one, the executor may have another one.

Results are described by the client's release and computed by the executor's. `make test-matrix` runs the client's tests with
executors of other releases.
"""

from __future__ import annotations

import re

Minor = tuple[int, int]
#: The oldest and the newest release that the tests have run with, on both sides.
OLDEST: Minor = (2, 11)
NEWEST: Minor = (2, 15)
#: Operators of the allow-list that not every tested release has: the first release with the operator, or None if all older ones
#: have it, and the first release without it, or None.
LIFETIMES: dict[str, tuple[Minor | None, Minor | None]] = {
    "aten._foreach_clone.default": ((2, 12), None),
    "aten._foreach_clone.out": ((2, 12), None),
    "aten._foreach_mm.default": ((2, 13), None),
    "aten._upsample_lanczos2d_aa.default": ((2, 12), None),
    "aten._upsample_lanczos2d_aa.out": ((2, 12), None),
    "aten._upsample_lanczos2d_aa_backward.default": ((2, 12), None),
    "aten._upsample_lanczos2d_aa_backward.grad_input": ((2, 12), None),
    "aten.cholesky.default": (None, (2, 14)),
    "aten.cholesky.out": (None, (2, 14)),
}


def minor_of(version: str) -> Minor | None:
    """Return the first two numbers of a version ("2.13.0+cpu": 2, 13); None for other text."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})(?!\d)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def mismatch(client: str, executor: str) -> str:
    """Return why a client and an executor with these versions of PyTorch do not work together; empty: they do.

    They do if both have the same release, or if each has a tested one. An executor that does not tell its version is accepted.
    """
    here, there = minor_of(client), minor_of(executor)
    if here is None or there is None or here == there or (_tested(here) and _tested(there)):
        return ""
    return (
        f"this client has PyTorch {client}, and the executor has PyTorch {executor}. Different releases work together only "
        f"from {_text(OLDEST)} to {_text(NEWEST)}. Install PyTorch {_text(there)} here (pip install 'torch=={_text(there)}.*'), "
        f"or PyTorch {_text(here)} on the executor"
    )


def lacks(version: str, name: str) -> bool:
    """Return whether PyTorch of this version lacks an operator of the allow-list. An unknown version lacks none."""
    release = minor_of(version)
    since, until = LIFETIMES.get(name, (None, None))
    return release is not None and ((since is not None and release < since) or (until is not None and release >= until))


def _tested(release: Minor) -> bool:
    return OLDEST <= release <= NEWEST


def _text(release: Minor) -> str:
    return f"{release[0]}.{release[1]}"
