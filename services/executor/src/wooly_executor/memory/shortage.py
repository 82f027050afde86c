"""Builds the message of a failed allocation: what was requested, what is free, and which sessions hold the memory."""

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
    """The message of a failed allocation. Sessions of other tenants are only summed up.

    Args:
        pool: the device's blocks.
        book: shared contents.
        accounts: accounts of all sessions.
        account: account of the session that allocates.
        nbytes: requested bytes.
        quota: the session's quota, if the allocation exceeds it; else None.
        held: bytes that count towards the quota.
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
