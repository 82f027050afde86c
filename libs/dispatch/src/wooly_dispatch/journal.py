"""The journal of decisions: written in batches, chained by hashes, replayed to the last decision.

An *entry* is one event with the decisions on it, a line of JSON: `[event, [decision, …]]`, each a list of its type's tag and its
fields in order. Entries are numbered 1, 2, 3, …. The chain's link n is BLAKE2b-256(link n-1 || entry n), however the batches are
cut. A batch carries the link before its first entry and the one after its last.

    journal = Journal("gpu-0/1")                    replayer = Replayer("gpu-0/1")
    journal.record(event, decisions)                for event, decisions in replayer.replay(Batch.decode(data)):
    publish(journal.cut().encode())                     metrics.observe(event, decisions)

`record` only keeps a reference; encoding and hashing happen in `cut`, off the path of a decision.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from hashlib import blake2b
from operator import attrgetter
from typing import Any, get_args

from wooly_dispatch.core import step
from wooly_dispatch.decisions import Decision
from wooly_dispatch.errors import GapError, JournalError, ReplayError
from wooly_dispatch.events import Config, Event, Policy
from wooly_dispatch.state import DispatchState, restore, snapshot

GENESIS = "0" * 64
"""The link before the first entry."""


def _tag(kind: type) -> str:
    return kind.__name__.removesuffix("Event").removesuffix("Decision")


_KINDS: dict[str, type] = {_tag(kind): kind for kind in (*get_args(Event), *get_args(Decision), Config, Policy)}
_EVENTS = {_tag(kind) for kind in get_args(Event)}
_DECISIONS = {_tag(kind) for kind in get_args(Decision)}


def _getter(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    names = [f.name for f in fields(kind)]
    if len(names) == 1:
        return lambda value: (getattr(value, names[0]),)
    found: Callable[[Any], tuple[Any, ...]] = attrgetter(*names)
    return found


_GETTERS = {kind: (tag, _getter(kind)) for tag, kind in _KINDS.items()}


def _pack(value: Any) -> list[Any]:
    tag, getter = _GETTERS[type(value)]
    return [tag, *getter(value)]


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_pack).encode


def encode_entry(event: Event, decisions: list[Decision]) -> bytes:
    """One entry's canonical bytes, without a line end."""
    return _encode([event, decisions]).encode()


def decode_entry(data: bytes) -> tuple[Event, list[Decision]]:
    """The opposite of `encode_entry`.

    Raises:
        JournalError: the bytes are no entry, or not its canonical bytes.
    """
    try:
        event, decisions = json.loads(data)
        entry = (_unpack(event, _EVENTS), [_unpack(d, _DECISIONS) for d in decisions])
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise JournalError(f"not an entry: {type(e).__name__}: {e}") from e
    if encode_entry(*entry) != data:
        raise JournalError("not the canonical bytes of an entry")
    return entry


def _unpack(data: Any, allowed: set[str]) -> Any:
    tag, *values = data
    if tag not in allowed:
        raise ValueError(f"unknown tag {tag!r}")
    kind = _KINDS[tag]
    for at, (value, f) in enumerate(zip(values, fields(kind), strict=True)):
        if f.name in ("policy", "config"):
            values[at] = _unpack(value, {"Policy", "Config"})
            wanted: type = Policy if f.name == "policy" else Config
        elif f.name == "kernels":
            values[at] = tuple(value)
            wanted = tuple
            if any(type(v) is not int for v in value):
                raise ValueError("kernels are integers")
        else:
            wanted = {"str": str, "bool": bool}.get(str(f.type), int)
        if type(values[at]) is not wanted:
            raise ValueError(f"{f.name} of {tag} is a {wanted.__name__}")
    return kind(*values)


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries `first` to `last` of a journal: their lines, and the links before and after them (`previous`, `digest`; hex)."""

    journal: str
    first: int
    last: int
    previous: str
    digest: str
    entries: bytes

    def encode(self) -> bytes:
        """A line of JSON with the fields, then the entries."""
        head = [self.journal, self.first, self.last, self.previous, self.digest]
        return _encode(head).encode() + b"\n" + self.entries

    @staticmethod
    def decode(data: bytes) -> Batch:
        """The opposite of `encode`.

        Raises:
            JournalError: the bytes are no batch, or its end is missing.
        """
        line, _, entries = data.partition(b"\n")
        try:
            journal, first, last, previous, digest = json.loads(line)
            types = [type(v) for v in (journal, first, last, previous, digest)]
        except (ValueError, TypeError, RecursionError) as e:
            raise JournalError(f"not a batch: {e}") from e
        if types != [str, int, int, str, str] or first < 1:
            raise JournalError("not a batch: its head has other fields")
        if entries.count(b"\n") != last - first + 1 or not entries.endswith(b"\n"):
            whole = entries.count(b"\n")
            raise JournalError(f"batch {first} to {last} has {whole} whole entries")
        return Batch(journal, first, last, previous, digest, entries)

    def lines(self) -> list[bytes]:
        """The entries, without line ends."""
        return self.entries.split(b"\n")[:-1]


def _chained(link: str, lines: list[bytes]) -> str:
    found = bytes.fromhex(link)
    for line in lines:
        found = blake2b(found + line, digest_size=32).digest()
    return found.hex()


class Journal:
    """Collects entries and cuts them to batches.

    Args:
        name: Unique to this run of this device: a restarted executor begins another journal, or goes on from a checkpoint.
        first: The number of the next entry.
        link: The link before it.
    """

    def __init__(self, name: str, first: int = 1, link: str = GENESIS) -> None:
        self.name, self.next, self.link = name, first, link
        self._pending: list[tuple[Event, list[Decision]]] = []

    def __len__(self) -> int:
        """Entries recorded and not cut."""
        return len(self._pending)

    def record(self, event: Event, decisions: list[Decision]) -> None:
        """Add one entry. Neither value may change afterwards."""
        self._pending.append((event, decisions))

    def cut(self) -> Batch | None:
        """Everything recorded since the last cut; None if that is nothing."""
        if not self._pending:
            return None
        lines = [encode_entry(event, decisions) for event, decisions in self._pending]
        self._pending = []
        first, previous = self.next, self.link
        self.next += len(lines)
        self.link = _chained(previous, lines)
        return Batch(self.name, first, self.next - 1, previous, self.link, b"\n".join(lines) + b"\n")


class Replayer:
    """Runs the core over a journal's batches and compares every decision. `state` is the core's as of the last entry."""

    def __init__(self, name: str, state: DispatchState | None = None, first: int = 1, link: str = GENESIS) -> None:
        self.name, self.next, self.link = name, first, link
        self.state = state or DispatchState()

    def feed(self, batch: Batch) -> list[tuple[Event, list[Decision]]]:
        """All of `replay`."""
        return list(self.replay(batch))

    def replay(self, batch: Batch) -> Iterator[tuple[Event, list[Decision]]]:
        """Replay a batch: its entries one by one, with `state` as it was after each; none if the batch was replayed before.

        Run it to its end: the hash is compared there.

        Raises:
            JournalError: the batch belongs to another journal.
            GapError: entries before it are missing. Nothing changed: feed those, then this one again.
            ReplayError: the batch does not follow from what came before it; names the entry. The replayer is of no further use.
        """
        if batch.journal != self.name:
            raise JournalError(f"a batch of {batch.journal}, not of {self.name}")
        if batch.last < self.next:
            return
        if batch.first > self.next:
            raise GapError(self.next, batch.first)
        lines = batch.lines()[self.next - batch.first :]
        if batch.first == self.next and batch.previous != self.link:
            raise ReplayError(self.next, "the batch continues another history")
        for line in lines:
            try:
                event, recorded = decode_entry(line)
            except JournalError as e:
                raise ReplayError(self.next, str(e)) from e
            self.state, decisions = step(self.state, event)
            if decisions != recorded:
                raise ReplayError(self.next, f"{event} was answered with {recorded}, the rule says {decisions}")
            self.next += 1
            yield event, decisions
        link = _chained(self.link, lines)
        if link != batch.digest:
            raise ReplayError(self.next - len(lines), "from here on the entries are not those that were hashed")
        self.link = link

    def checkpoint(self) -> bytes:
        """Everything needed to go on from here: `resume`."""
        return _encode([self.name, self.next, self.link]).encode() + b"\n" + snapshot(self.state)

    @staticmethod
    def resume(data: bytes) -> Replayer:
        """A replayer as it was when `checkpoint` was called."""
        head, _, state = data.partition(b"\n")
        name, first, link = json.loads(head)
        return Replayer(name, restore(state), first, link)
