"""Names of settings that people know from another GPU hypervisor with the same prefix, where ours differ.

A name is read if ours is not set. If both are set and differ, ours counts, and a warning names both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OtherName:
    """A setting under another name.

    Attributes:
        theirs: the other name.
        ours: the name of Wooly's variable.
        convert: converts a value of theirs to one of ours. It raises ValueError, with the valid values, for others.
        meaning: what its values mean, for the reference.
    """

    theirs: str
    ours: str
    convert: Callable[[str], str]
    meaning: str


def _dedup(text: str) -> str:
    found = {"0": "off", "false": "off", "1": "tenant", "true": "tenant"}.get(text.strip().lower())
    if found is None:
        raise ValueError("use 0 or 1")
    return found


def _one_gpu(text: str) -> str:
    number = text.strip()
    if not number.isascii() or not number.isdigit():
        raise ValueError("use the number of one GPU; an executor serves one GPU, so start one for each")
    return number


def _mib(text: str) -> str:
    if not text.strip().isascii() or not text.strip().isdigit():
        raise ValueError("use a whole number of MiB")
    return str(int(text) << 20)


CLIENT = (OtherName("WOOLYAI_WEIGHTS_DEDUP", "WOOLYAI_DEDUP", _dedup, "`1` is `tenant`, `0` is `off`"),)
EXECUTOR = (
    OtherName("WOOLYAI_VRAM_OVERCOMMIT_PERCENT", "WOOLY_EXECUTOR_OVERCOMMIT_PERCENT", str.strip, "the same number"),
    OtherName("WOOLYAI_GPU_IDS", "WOOLY_EXECUTOR_DEVICE", _one_gpu, "one number; start one executor for each GPU"),
    OtherName("WOOLYAI_RESERVED_VRAM_MIB", "WOOLY_EXECUTOR_RESERVE", _mib, "MiB become bytes"),
)
#: Names that mean the same in both, and labels and annotations of Kubernetes; for the reference.
SAME = (
    "WOOLYAI_SWAP_FROM_VRAM",
    "CONTROLLER_DEFAULT_VRAM_OVERCOMMIT_PERCENT",
    "default_vram_overcommit_percent, overcommit_vram_percent and noswap (REST)",
    "woolyai.com/pod-vram, woolyai.com/priority, woolyai.com/swap-from-vram, woolyai.com/vram-overcommit-percent (Kubernetes)",
)


def translated(environment: Mapping[str, str], names: Iterable[OtherName]) -> tuple[dict[str, str], list[str]]:
    """Translate variables with other names.

    Args:
        environment: environment variables.
        names: the names to translate.

    Returns:
        The values of our variables that are not set, and warnings about those that are set to another value.

    Raises:
        ValueError: a value is not valid; the message names the variable and the valid values.
    """
    found: dict[str, str] = {}
    warnings: list[str] = []
    for name in names:
        if name.theirs not in environment:
            continue
        try:
            value = name.convert(environment[name.theirs])
        except ValueError as e:
            raise ValueError(f"{name.theirs}={environment[name.theirs]}: {e}; Wooly's name is {name.ours}") from e
        ours = environment.get(name.ours)
        if ours is None:
            found[name.ours] = value
        elif ours != value:
            warnings.append(
                f"{name.ours}={ours} counts, and {name.theirs}={environment[name.theirs]} does not; unset one"
            )
    return found, warnings
