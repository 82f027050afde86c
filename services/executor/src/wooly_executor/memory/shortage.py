"""Why memory cannot be had, in words: what was asked for, what is free, and who holds what."""

from __future__ import annotations

from collections.abc import Iterable

from wooly_executor.memory.accounts import Account
from wooly_executor.memory.book import Book
from wooly_executor.memory.pool import Pool


def shortage(
    pool: Pool,
    book: Book,
    accounts: Iterable[Account],
    account: Account,
    nbytes: int,
    quota: int | None,
    held: int,
) -> str:
    """Why so many bytes cannot be had. Other tenants' sessions are only counted together.

    Args:
        pool: the device's blocks.
        book: what is shared.
        accounts: of all sessions.
        account: who asks.
        nbytes: what for.
        quota: the session's, where that is what it would break.
        held: what counts towards it.
    """
    facts = pool.facts()
    said = [f"CUDA out of memory. Tried to allocate {_size(nbytes)}."]
    if quota is not None:
        said.append(f"The session's quota is {_size(quota)} of which {_size(quota - held)} is free.")
    else:
        said.append(
            f"{pool.name} has a total capacity of {_size(facts.capacity)} of which {_size(pool.free_bytes)} is free, "
            f"{_size(facts.largest)} of it in one piece."
        )
    blocks = [pool.size(o) for o in account.own.values()]
    part = book.bears(account.name)
    mine = f"This session holds {_size(sum(blocks))} in {len(blocks)} buffers"
    if blocks:
        mine += f", the largest of {_size(max(blocks))}"
    if account.workspace:
        mine += f", {_size(account.workspace)} of workspace"
    if account.shared:
        mine += f", and {_size(part)} as its part of {len(account.shared)} shared buffers"
    said.append(mine + ".")
    strangers = 0
    for other in accounts:
        total = pool.held(other.name) + book.bears(other.name)
        if other is account or not total:
            continue
        if other.tenant == account.tenant:
            said.append(f"Session {other.name} holds {_size(total)}.")
        else:
            strangers += total
    if strangers:
        said.append(f"Sessions of other tenants hold {_size(strangers)}.")
    return " ".join(said)


def _size(n: int) -> str:
    return f"{n / (1 << 30):.2f} GiB" if n >= 1 << 30 else f"{n / (1 << 20):.2f} MiB"
