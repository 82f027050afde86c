"""The journal of decisions: written in batches, chained by hashes, and replayed with a comparison of every decision.

An *entry* is one event with its decisions. It is a line of JSON: `[event, [decision, …]]`; each value is a list of its type's tag
and its fields in order. Entries are numbered 1, 2, 3, …. Link n of the chain is BLAKE2b-256(link n-1 || entry n), so the chain
does not depend on the batches. A batch has the link before its first entry and the link after its last entry.

    journal = Journal("gpu-0/1")                    replayer = Replayer("gpu-0/1")
    journal.record(event, decisions)                for event, decisions in replayer.replay(Batch.decode(data)):
    publish(journal.cut().encode())                     metrics.observe(event, decisions)

`record` only keeps a reference. `cut` encodes and hashes the entries, so this work does not delay a decision.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from hashlib import blake2b
from json.encoder import encode_basestring_ascii
from operator import attrgetter
from typing import Any, get_args, get_type_hints

from wooly_dispatch.core import step
from wooly_dispatch.decisions import Decision
from wooly_dispatch.errors import GapError, JournalError, ReplayError
from wooly_dispatch.events import Config, Event, Policy
from wooly_dispatch.state import DispatchState, restore, snapshot

GENESIS = "0" * 64
"""The link before the first entry."""


def _tag(kind: type) -> str:
    return kind.__name__.removesuffix("Event").removesuffix("Decision")


def _pack(value: Any) -> str:
    form = _FORMS[type(value)]
    values = [*form.get(value)]
    for at, packed in form.packed:
        values[at] = packed(values[at])
    return form.template % tuple(values)


def _unpack(data: Any, allowed: set[str]) -> Any:
    tag, *values = data
    if tag not in allowed:
        raise ValueError(f"unknown tag {tag!r}")
    form = _BY_TAG[tag]
    if [*map(type, values)] != form.wanted:
        names = [f"{f.name}: {wanted.__name__}" for f, wanted in zip(fields(form.kind), form.wanted, strict=True)]
        raise ValueError(f"the fields of {tag} must be {', '.join(names)}")
    for at, read in form.nested:
        values[at] = read(values[at])
    return form.kind(*values)


def _packed_numbers(values: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, values))}]"


def _numbers(values: Any) -> tuple[int, ...]:
    if type(values) is not list or any(type(v) is not int for v in values):
        raise ValueError("it must be a list of integers")
    return tuple(values)


class _Form:
    """How values of one type are written and read: a list of the type's tag and its fields.

    Attributes:
        kind: the type.
        template: the text, with `%s` for each field.
        get: returns a value's fields.
        packed: index of each field that is not an integer, with the function that returns its text.
        wanted: the type that JSON gives for each field; `list` for fields in `nested`.
        nested: index of each field whose value is read by a function, with that function.
    """

    __slots__ = ("get", "kind", "nested", "packed", "template", "wanted")

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.packed: list[tuple[int, Callable[[Any], str]]] = []
        self.nested: list[tuple[int, Callable[[Any], Any]]] = []
        self.wanted: list[type] = []
        names = [f.name for f in fields(kind)]
        hints = get_type_hints(kind)
        for at, name in enumerate(names):
            wanted, packed, nested = self._field(hints[name])
            self.wanted.append(wanted)
            if packed is not None:
                self.packed.append((at, packed))
            if nested is not None:
                self.nested.append((at, nested))
        self.template = f'["{_tag(kind)}",{",".join(["%s"] * len(names))}]'
        if len(names) == 1:
            self.get: Callable[[Any], Iterable[Any]] = lambda value: (getattr(value, names[0]),)
        else:
            self.get = attrgetter(*names)

    @staticmethod
    def _field(given: Any) -> tuple[type, Callable[[Any], str] | None, Callable[[Any], Any] | None]:
        if given is int:
            return int, None, None
        if given is str:
            return str, encode_basestring_ascii, None
        if given is bool:
            return bool, lambda value: "true" if value else "false", None
        if given == tuple[int, ...]:
            return list, _packed_numbers, _numbers
        if given in (Config, Policy):
            return list, _pack, lambda data: _unpack(data, {_tag(given)})
        raise TypeError(f"a journal cannot have a field of type {given}")


_FORMS: dict[type, _Form] = {kind: _Form(kind) for kind in (*get_args(Event), *get_args(Decision), Config, Policy)}
_BY_TAG = {_tag(kind): form for kind, form in _FORMS.items()}
_EVENTS = {_tag(kind) for kind in get_args(Event)}
_DECISIONS = {_tag(kind) for kind in get_args(Decision)}
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_decode = json.JSONDecoder().raw_decode


def encode_entry(event: Event, decisions: list[Decision]) -> bytes:
    """The canonical bytes of one entry, without a newline."""
    return f"[{_pack(event)},[{','.join([_pack(d) for d in decisions])}]]".encode()


def decode_entry(data: bytes) -> tuple[Event, list[Decision]]:
    """Decode the bytes of one entry.

    Raises:
        JournalError: the bytes are not the canonical bytes of an entry.
    """
    event, decisions = _read(data)
    try:
        entry = (event, [_unpack(d, _DECISIONS) for d in decisions])
    except (ValueError, TypeError) as e:
        raise JournalError(f"the bytes are not an entry: {type(e).__name__}: {e}") from e
    if encode_entry(*entry) != data:
        raise JournalError("the entry is not in canonical form")
    return entry


def _read(data: bytes) -> tuple[Event, list[Any]]:
    """The event of an entry, and its decisions as they are read from JSON."""
    try:
        (event, decisions), _ = _decode(data.decode())
        return _unpack(event, _EVENTS), decisions
    except (ValueError, TypeError, RecursionError) as e:
        raise JournalError(f"the bytes are not an entry: {type(e).__name__}: {e}") from e


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries `first` to `last` of a journal as lines, with the links before and after them (`previous` and `digest`, in hex)."""

    journal: str
    first: int
    last: int
    previous: str
    digest: str
    entries: bytes

    def encode(self) -> bytes:
        """The bytes of the batch: a line of JSON with the fields, then the entries."""
        head = [self.journal, self.first, self.last, self.previous, self.digest]
        return _encode(head).encode() + b"\n" + self.entries

    @staticmethod
    def decode(data: bytes) -> Batch:
        """Decode the bytes of a batch.

        Raises:
            JournalError: the bytes are not a batch, or the batch is incomplete.
        """
        line, _, entries = data.partition(b"\n")
        try:
            journal, first, last, previous, digest = json.loads(line)
            types = [type(v) for v in (journal, first, last, previous, digest)]
        except (ValueError, TypeError, RecursionError) as e:
            raise JournalError(f"the bytes are not a batch: {e}") from e
        if types != [str, int, int, str, str] or first < 1:
            raise JournalError("the bytes are not a batch: the first line has other fields")
        if entries.count(b"\n") != last - first + 1 or not entries.endswith(b"\n"):
            whole = entries.count(b"\n")
            raise JournalError(f"the batch declares entries {first} to {last}, but has {whole} complete entries")
        return Batch(journal, first, last, previous, digest, entries)

    def lines(self) -> list[bytes]:
        """The entries, without newlines."""
        return self.entries.split(b"\n")[:-1]


def _chained(link: str, lines: list[bytes]) -> str:
    found = bytes.fromhex(link)
    for line in lines:
        found = blake2b(found + line, digest_size=32).digest()
    return found.hex()


class Journal:
    """Collects entries and cuts them into batches.

    Args:
        name: unique for this run of this device. A restarted executor begins another journal, or continues from a checkpoint.
        first: number of the next entry.
        link: link before the next entry.
    """

    def __init__(self, name: str, first: int = 1, link: str = GENESIS) -> None:
        self.name, self.next, self.link = name, first, link
        self._pending: list[tuple[Event, list[Decision]]] = []

    def __len__(self) -> int:
        """Number of entries since the last cut."""
        return len(self._pending)

    def record(self, event: Event, decisions: list[Decision]) -> None:
        """Add one entry. The event and the decisions must not change afterwards."""
        self._pending.append((event, decisions))

    def cut(self) -> Batch | None:
        """A batch of all entries since the last cut; None if there are none."""
        if not self._pending:
            return None
        lines = [encode_entry(event, decisions) for event, decisions in self._pending]
        self._pending = []
        first, previous = self.next, self.link
        self.next += len(lines)
        self.link = _chained(previous, lines)
        return Batch(self.name, first, self.next - 1, previous, self.link, b"\n".join(lines) + b"\n")


class Replayer:
    """Replays a journal's batches and compares every decision. `state` is the core's state after the last entry."""

    def __init__(self, name: str, state: DispatchState | None = None, first: int = 1, link: str = GENESIS) -> None:
        self.name, self.next, self.link = name, first, link
        self.state = state or DispatchState()

    def feed(self, batch: Batch) -> list[tuple[Event, list[Decision]]]:
        """The entries of `replay`, as a list."""
        return list(self.replay(batch))

    def replay(self, batch: Batch) -> Iterator[tuple[Event, list[Decision]]]:
        """Replay a batch and yield its entries one by one, with `state` up to date. A batch that was replayed before has none.

        Run the iterator to its end, because the hash is compared there.

        Raises:
            JournalError: the batch belongs to another journal.
            GapError: entries before the batch are missing. Nothing changed: feed those entries, then this batch again.
            ReplayError: the batch differs from the rule or its hash. The error names the entry. Do not use the replayer again.
        """
        if batch.journal != self.name:
            raise JournalError(f"the batch belongs to journal {batch.journal}, not to {self.name}")
        if batch.last < self.next:
            return
        if batch.first > self.next:
            raise GapError(self.next, batch.first)
        lines = batch.lines()[self.next - batch.first :]
        if batch.first == self.next and batch.previous != self.link:
            raise ReplayError(self.next, "the batch's previous link differs: the batch continues another journal")
        for line in lines:
            try:
                event, _ = _read(line)
                self.state, decisions = step(self.state, event)
                if encode_entry(event, decisions) != line:
                    _, recorded = decode_entry(line)
                    raise ReplayError(
                        self.next, f"the journal has {recorded} for {event}, but the rule gives {decisions}"
                    )
            except JournalError as e:
                raise ReplayError(self.next, str(e)) from e
            self.next += 1
            yield event, decisions
        link = _chained(self.link, lines)
        if link != batch.digest:
            raise ReplayError(
                self.next - len(lines), "the hash of the entries from here on differs: an entry was changed"
            )
        self.link = link

    def checkpoint(self) -> bytes:
        """The replayer's state as bytes, for `resume`."""
        return _encode([self.name, self.next, self.link]).encode() + b"\n" + snapshot(self.state)

    @staticmethod
    def resume(data: bytes) -> Replayer:
        """The replayer that `checkpoint` described."""
        head, _, state = data.partition(b"\n")
        name, first, link = json.loads(head)
        return Replayer(name, restore(state), first, link)
