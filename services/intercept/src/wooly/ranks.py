"""Which rank of which program this process is, as its launcher says: torchrun and alike by variables, `mp.spawn` by `children`.

The controller places the ranks of one program together. The ranks find each other by an id that only they have.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass

#: Variable with a random id that `wooly run` gives to the program that it starts.
VARIABLE = "WOOLY_GANG_ID"
_LOCAL = ("", "localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank of a program.

    Attributes:
        gang_id: id of the program in this start.
        rank: number of the rank.
        size: number of ranks.
        here: number of ranks on this machine.
    """

    gang_id: str
    rank: int
    size: int
    here: int


#: The rank of a child process that `mp.spawn` has started.
spawned: Rank | None = None


def own(environment: Mapping[str, str] = os.environ) -> Rank | None:
    """The rank that this process is; None if it is no rank of a program with several ranks."""
    rank, size, here = [_number(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    if rank is None or size is None or size < 2 or rank >= size:
        return spawned
    address = environment.get("MASTER_ADDR", "")
    names = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE")
    known = [address, *[environment.get(name, "") for name in names]]
    if here == size or address in _LOCAL:
        # Programs on other machines, and other programs on this one, may have the same address and port.
        known.append(environment.get(VARIABLE) or f"{socket.gethostname()}:{os.getppid()}")
    gang_id = hashlib.sha256("\0".join(known).encode(errors="replace")).hexdigest()[:32]
    return Rank(gang_id, rank, size, min(here or 1, size))


def new_id() -> str:
    """A random id of a program."""
    return secrets.token_hex(16)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None
