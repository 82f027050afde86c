"""The checkpoints of sessions: chunks by name, and one list per cut, encrypted or not, in a folder or an object store."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wooly_bus.contents import CHUNK

from wooly_executor.checkpoints.encryption import Encrypted, Plain, Secret, TenantCipher
from wooly_executor.checkpoints.folder import FolderStore
from wooly_executor.checkpoints.stores import Store
from wooly_executor.errors import CheckpointError

#: Version of the lists of cuts. Another version cannot be restored.
VERSION = 1
#: Chunks that are stored or read together: more small ones would keep other sessions waiting.
TOGETHER = 256


@dataclass(frozen=True, slots=True)
class SavedBuffer:
    """One buffer of a cut.

    Attributes:
        nbytes: size of the buffer.
        chunks: names of its chunks, in order.
        poison: why the buffer has no content; empty if it has.
    """

    nbytes: int
    chunks: tuple[bytes, ...] = ()
    poison: str = ""


#: The buffers of a cut, by id.
Table = dict[int, SavedBuffer]


class SessionFiles:
    """What one session's cuts have stored. Any thread may use it, one at a time.

    Args:
        store: where everything lies.
        cipher: how it is named and encrypted.
        session_id: id of the session; of its second device and later ones, with the device's index.
        earlier: its files under an earlier key, which are only read and removed; None: there is no earlier key.

    Attributes:
        at_once: bytes that one call of `keep` should have.
        read_at_once: bytes that one call of `load` should have.
    """

    def __init__(
        self, store: Store, cipher: TenantCipher, session_id: str, earlier: SessionFiles | None = None
    ) -> None:
        self._store, self._cipher, self._id, self._earlier = store, cipher, session_id, earlier
        self._place = store.session(cipher.folder, cipher.session_folder(session_id))
        self.at_once, self.read_at_once = store.at_once, store.read_at_once
        self._kept: set[bytes] = set()
        #: Names of the chunks of lists, by cut.
        self._needed: dict[int, set[bytes]] = {}

    def together(self, chunks: Sequence[memoryview], at_once: int) -> Iterator[slice]:
        """Divide chunks into parts of about `at_once` bytes, each for one call of `keep` or `load`."""
        begin = nbytes = 0
        for i, chunk in enumerate(chunks):
            nbytes += len(chunk)
            if nbytes >= at_once or i + 1 - begin >= TOGETHER or i + 1 == len(chunks):
                yield slice(begin, i + 1)
                begin, nbytes = i + 1, 0

    def keep(self, chunks: Sequence[memoryview]) -> tuple[list[bytes], int]:
        """Store those chunks that are not stored yet. When this returns or raises, the chunks may change.

        Returns:
            Their names, and the core time in ns.

        Raises:
            OSError: the disk is full or has failed.
            CheckpointError: the object store has failed.
        """
        done = self._store.each(self._keep, chunks)
        return [name for name, _ in done], sum([ns for _, ns in done])

    def _keep(self, chunk: memoryview) -> tuple[bytes, int]:
        begun = time.thread_time_ns()
        name = self._cipher.name(chunk)
        if name not in self._kept:
            self._place.keep(name.hex(), len(chunk), lambda: self._cipher.encrypt_chunk(name, chunk))
            self._kept.add(name)
        return name, time.thread_time_ns() - begun

    def write(self, number: int, table: Table, known: int) -> None:
        """Write the list of a cut whose chunks are stored. Cuts before `known`, and chunks that no cut needs, are removed.

        Raises:
            OSError: the disk is full or has failed.
            CheckpointError: the object store has failed.
        """
        buffers = [[b, s.nbytes, [c.hex() for c in s.chunks], s.poison] for b, s in table.items()]
        text = json.dumps({"version": VERSION, "buffers": buffers}, separators=(",", ":")).encode()
        self._place.put_list(number, self._cipher.encrypt_list(self._id, number, text))
        self._needed[number] = _chunks(table)
        self._forget_before(known)

    def _forget_before(self, known: int) -> None:
        numbers = self._place.lists()
        for number in numbers:
            if number not in self._needed:
                with contextlib.suppress(CheckpointError):  # it cannot be restored, so it needs nothing
                    self._needed[number] = _chunks(self.read(number))
        over = [number for number in numbers if number < known]
        self._place.drop_lists(over)
        unneeded = self._kept.union(*[self._needed.pop(number, set()) for number in over])
        unneeded.difference_update(*self._needed.values())
        self._place.drop([name.hex() for name in unneeded])
        self._kept -= unneeded

    def holder(self, number: int) -> SessionFiles:
        """The files that have a cut: these, or those under the earlier key.

        Raises:
            OSError: the place has failed.
            CheckpointError: the object store has failed.
        """
        earlier = self._earlier
        if earlier is None or number in self._place.lists() or number not in earlier._place.lists():
            return self
        return earlier

    def read(self, number: int) -> Table:
        """The buffers of a cut.

        Raises:
            CheckpointError: the cut is not stored here, or its list is damaged.
        """
        try:
            text = self._cipher.decrypt_list(self._id, number, self._place.get_list(number))
            found = json.loads(text)
            if found["version"] != VERSION:
                raise CheckpointError(f"checkpoint {number} has version {found['version']}, not {VERSION}")
            return {int(b): _saved(int(n), chunks, str(poison)) for b, n, chunks, poison in found["buffers"]}
        except FileNotFoundError as e:
            raise CheckpointError(
                f"this executor does not have checkpoint {number} of the session; executors that may replace each other need "
                f"one place for checkpoints (WOOLY_EXECUTOR_CHECKPOINTS){self._other_keys()}"
            ) from e
        except OSError as e:
            raise CheckpointError(f"the list of checkpoint {number} cannot be read: {e}") from e
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise CheckpointError(f"the list of checkpoint {number} is damaged: {e}") from e

    def _other_keys(self) -> str:
        """With which other keys something lies in the same place, as the end of a sentence."""
        others = self._store.others()
        if not others:
            return ""
        named = " and ".join([f"with the key {key}" if key else "without a key" for key in others])
        return f" and one WOOLY_EXECUTOR_CHECKPOINT_KEY: there are checkpoints {named}"

    def load(self, chunks: Sequence[tuple[bytes, memoryview]]) -> None:
        """Fill memory with chunks, by name.

        Raises:
            CheckpointError: a chunk is missing or damaged.
        """
        self._store.read_each(self._load, chunks)

    def _load(self, chunk: tuple[bytes, memoryview]) -> None:
        name, into = chunk
        longer = self._cipher.longer
        stored = memoryview(bytearray(len(into) + longer)) if longer else into
        try:
            nbytes = self._place.fill(name.hex(), stored)
        except OSError as e:
            raise CheckpointError(f"a chunk of the checkpoint cannot be read: {e}") from e
        if nbytes != len(stored):
            raise CheckpointError(
                f"a chunk of the checkpoint is damaged: it has {nbytes} bytes in the store, not {len(stored)}"
            )
        self._cipher.decrypt_chunk(name, stored, into)

    def touch(self) -> None:
        """Note that the session is open, so that `Checkpoints.sweep` leaves its files."""
        if self._earlier is not None and self._earlier._place.lists():
            self._earlier.touch()
        self._place.touch()

    def remove(self) -> None:
        """Remove all cuts of the session."""
        self._place.remove()
        if self._earlier is not None:
            self._earlier.remove()


class Checkpoints:
    """The place of all checkpoints.

    Args:
        store: where everything lies; a path: in this folder.
        kept_s: seconds for which the files of a session remain that no executor has open.
        secret: the secret with which everything is encrypted; None: nothing is.
        earlier: another secret, for what is only read; None: there is none.
    """

    def __init__(
        self, store: Store | Path, kept_s: float, secret: Secret | None = None, earlier: Secret | None = None
    ) -> None:
        key = "" if secret is None else secret.id
        self._store = FolderStore(store, key) if isinstance(store, Path) else store
        self._kept_s, self._secret, self._earlier = kept_s, secret, earlier

    def identity(self) -> str:
        """The name of the place. Executors with the same name can restore each other's sessions.

        Raises:
            OSError: the place cannot be used.
        """
        return self._identity(self._secret)

    def readable(self) -> tuple[str, ...]:
        """The names of places whose checkpoints can be restored here, besides `identity`.

        Raises:
            OSError: the place cannot be used.
        """
        return () if self._earlier is None else (self._identity(self._earlier),)

    def _identity(self, secret: Secret | None) -> str:
        return self._store.identity() + ("" if secret is None else f"-{secret.id}")

    def of(self, tenant: str, session_id: str, part: int = 0) -> SessionFiles:
        """The files of a session's device; `part`: its index."""
        cipher = Plain(tenant) if self._secret is None else Encrypted(self._secret, tenant)
        name = f"{session_id}/{part}" if part else session_id
        earlier = None
        if self._earlier is not None:
            earlier = SessionFiles(self._store.keyed(self._earlier.id), Encrypted(self._earlier, tenant), name)
        return SessionFiles(self._store, cipher, name, earlier)

    def sweep(self) -> int:
        """Remove the files of sessions that ended without their client. Returns the number of sessions."""
        return self._store.sweep(time.time() - self._kept_s)

    def close(self) -> None:
        """Let requests that are being repeated fail soon."""
        self._store.close()


def chunks_of(data: memoryview) -> list[memoryview]:
    """The chunks of a buffer's bytes."""
    return [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]


def _chunks(table: Table) -> set[bytes]:
    """The names of the chunks of a cut."""
    return {name for saved in table.values() for name in saved.chunks}


def _saved(nbytes: int, chunks: list[str], poison: str) -> SavedBuffer:
    names = tuple([bytes.fromhex(chunk) for chunk in chunks])
    if nbytes < 0 or (len(names) != -(-nbytes // CHUNK) and not poison):
        raise ValueError(f"a buffer of {nbytes} bytes has {len(names)} chunks")
    return SavedBuffer(nbytes, names, poison)
