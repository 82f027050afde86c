"""Memory that a program makes and frees, and then gives to a later kernel of the script in the same program.

A script makes the memory for a kernel's results uninitialised, and the executor zeroes it, because it may contain bytes of other
sessions ([ADR 115](../../../../../docs/adr/0115-let-kernels-of-scripts-take-memory-that-their-program-has-freed.md)). For kernels
that wait for memory, as most do, this takes a third of the time. Memory that the same program has made contains only bytes of
its own session, so it needs no zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from wooly_wis.foreign import OPCODE
from wooly_wis.pauses import pause

from wooly_executor.runtime.acts import Act
from wooly_executor.runtime.buffers import required_view


def reused_memory(
    acts: Sequence[Act], nbytes: Sequence[int | None], first_use: Mapping[int, tuple[int, int]]
) -> dict[int, int]:
    """Return the slots whose memory comes from another slot of the program, with this other slot.

    Both are first used by kernels of the script, as the same dtype, and have equally many bytes. The memory is held from the
    `free` to the next `alloc`. A pair for which the program would hold more than its peak is left out.

    Args:
        acts: the program's acts.
        nbytes: per slot, its bytes if the program allocates it, else None.
        first_use: for each slot, act and operand of its first use after the `alloc`.
    """
    found: dict[int, int] = {}
    if not any(act.form.opcode == OPCODE for act in acts):
        return found
    #: Bytes that the program holds after each act.
    held = list(accumulate([_growth(act, nbytes) for act in acts]))
    peak = max(held, default=0)
    free: dict[tuple[int, object], list[tuple[int, int]]] = {}
    for i, act in enumerate(acts):
        pause()
        opcode = act.form.opcode
        if opcode not in ("alloc", "free"):
            continue
        (slot,) = act.slots
        size, first = nbytes[slot], first_use.get(slot)
        if not size or first is None or acts[first[0]].form.opcode != OPCODE or acts[first[0]].launch is not None:
            continue
        key = size, required_view(acts[first[0]].form.operands[first[1]].view).dtype
        waiting = free.setdefault(key, [])
        if opcode == "free":
            waiting.append((slot, i))
            continue
        while waiting:  # the latest first: it was held for the shortest time
            old, since = waiting.pop()
            if max(held[since:i]) + size <= peak:
                found[slot] = old
                held[since:i] = [before + size for before in held[since:i]]
                break
    return found


def _growth(act: Act, nbytes: Sequence[int | None]) -> int:
    """Return the bytes by which an act changes what the program holds."""
    sign = {"alloc": 1, "free": -1}.get(act.form.opcode, 0)
    return sign * (nbytes[act.slots[0]] or 0) if sign else 0
