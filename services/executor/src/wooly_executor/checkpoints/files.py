"""The files of checkpoints: chunks by their digest, and one list per cut.

    <folder>/<tenant>/chunks/<digest>            a chunk that sessions of the tenant share
    <folder>/<tenant>/sessions/<session>/        a hard link to each chunk that the session's cuts need, and `cut-<number>.json`

The file system counts the references to a chunk: a chunk with a single link belongs to no session and is removed. Several
executors, and executors of several machines with a common file system, may use one folder at the same time. Files are not synced
to the disk: they survive the process, and not a power cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from wooly_bus.contents import CHUNK, chunk_digest

from wooly_executor.errors import CheckpointError

#: Bytes of the disk that must stay free.
LEFT_FREE = 1 << 30
#: Version of the lists of cuts. Another version cannot be restored.
VERSION = 1


@dataclass(frozen=True, slots=True)
class SavedBuffer:
    """One buffer of a cut.

    Attributes:
        nbytes: size of the buffer.
        chunks: digests of its chunks, in order.
        poison: why the buffer has no content; empty if it has.
    """

    nbytes: int
    chunks: tuple[bytes, ...] = ()
    poison: str = ""


#: The buffers of a cut, by id.
Table = dict[int, SavedBuffer]


class SessionFiles:
    """The files of one session's cuts. Any thread may use them, one at a time.

    Args:
        tenant: folder of the session's tenant.
        session_id: id of the session.
    """

    def __init__(self, tenant: Path, session_id: str) -> None:
        self._pool = tenant / "chunks"
        self.folder = tenant / "sessions" / _name(session_id)
        self._kept: set[bytes] = set()

    def keep(self, data: memoryview) -> bytes:
        """Store a chunk, unless it is stored. Returns its digest.

        Raises:
            OSError: the disk is full or has failed.
        """
        digest = chunk_digest(data)
        if digest not in self._kept:
            self._link(digest, data)
            self._kept.add(digest)
        return digest

    def _link(self, digest: bytes, data: memoryview) -> None:
        own, shared = self.folder / digest.hex(), self._pool / digest.hex()
        if own.exists():
            return
        try:
            os.link(shared, own)
            return
        except FileNotFoundError:
            self._pool.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if shutil.disk_usage(self._pool).free < len(data) + LEFT_FREE:
            raise OSError(f"the disk of {self._pool.parent.parent} is almost full")
        new = self.folder / f"{digest.hex()}.new"
        new.write_bytes(data)
        with contextlib.suppress(FileExistsError):
            os.link(new, shared)
        new.rename(own)

    def write(self, number: int, table: Table, known: int) -> None:
        """Write the list of a cut whose chunks are stored. Cuts before `known`, and chunks that no cut needs, are removed.

        Raises:
            OSError: the disk is full or has failed.
        """
        buffers = [[b, s.nbytes, [c.hex() for c in s.chunks], s.poison] for b, s in table.items()]
        text = json.dumps({"version": VERSION, "buffers": buffers}, separators=(",", ":"))
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = self.folder / f"cut-{number}.new"
        new.write_text(text)
        new.rename(self._list(number))
        self._forget_before(known, {number: table})

    def _list(self, number: int) -> Path:
        return self.folder / f"cut-{number}.json"

    def _forget_before(self, known: int, tables: dict[int, Table]) -> None:
        needed: set[str] = set()
        for path in self.folder.glob("cut-*.json"):
            number = int(path.stem.removeprefix("cut-"))
            if number < known:
                path.unlink(missing_ok=True)
                continue
            table = tables.get(number) or self.read(number)
            needed.update([chunk.hex() for saved in table.values() for chunk in saved.chunks])
        names = [entry.name for entry in os.scandir(self.folder) if not entry.name.startswith("cut-")]
        self._drop([name for name in names if name not in needed])

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
            if "." in name:  # a list, or a file that was not finished
                continue
            shared = self._pool / name
            with contextlib.suppress(FileNotFoundError):
                if shared.stat().st_nlink == 1:
                    shared.unlink()
            self._kept.discard(bytes.fromhex(name))

    def read(self, number: int) -> Table:
        """The buffers of a cut.

        Raises:
            CheckpointError: the cut is not stored here, or its list is damaged.
        """
        try:
            found = json.loads(self._list(number).read_bytes())
            if found["version"] != VERSION:
                raise CheckpointError(f"checkpoint {number} has version {found['version']}, not {VERSION}")
            return {
                int(b): SavedBuffer(int(nbytes), tuple([bytes.fromhex(c) for c in chunks]), str(poison))
                for b, nbytes, chunks, poison in found["buffers"]
            }
        except FileNotFoundError as e:
            raise CheckpointError(
                f"this executor does not have checkpoint {number} of the session; executors that may replace each other need "
                "one folder for checkpoints (WOOLY_EXECUTOR_CHECKPOINTS)"
            ) from e
        except (ValueError, KeyError, TypeError) as e:
            raise CheckpointError(f"the list of checkpoint {number} is damaged: {e}") from e

    def load(self, digest: bytes, into: memoryview) -> None:
        """Fill `into` with a chunk.

        Raises:
            CheckpointError: the chunk is missing or damaged.
        """
        try:
            with (self.folder / digest.hex()).open("rb", buffering=0) as file:
                at = 0
                while at < len(into) and (n := file.readinto(into[at:])):
                    at += n
        except OSError as e:
            raise CheckpointError(f"a chunk of the checkpoint cannot be read: {e}") from e
        if at != len(into) or chunk_digest(into) != digest:
            raise CheckpointError("a chunk of the checkpoint is damaged")

    def touch(self) -> None:
        """Note that the session is open, so that `Checkpoints.sweep` leaves its files."""
        with contextlib.suppress(OSError):
            os.utime(self.folder)

    def remove(self) -> None:
        """Remove all cuts of the session."""
        with contextlib.suppress(FileNotFoundError):
            self._drop([entry.name for entry in os.scandir(self.folder)])
            self.folder.rmdir()


class Checkpoints:
    """The folder of all checkpoints.

    Args:
        folder: the folder. It is made when the first cut is stored.
        kept_s: seconds for which the files of a session remain that no executor has open.
    """

    def __init__(self, folder: Path, kept_s: float) -> None:
        self._folder, self._kept_s = folder, kept_s

    def identity(self) -> str:
        """The name of the folder. Executors that use the same folder have the same name. The first call makes the folder.

        Raises:
            OSError: the folder cannot be made.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / "id"
        if not path.exists():
            new = self._folder / f"id-{os.getpid()}.new"
            new.write_text(secrets.token_hex(16))
            with contextlib.suppress(FileExistsError):  # another executor was first
                os.link(new, path)
            new.unlink()
        return path.read_text()

    def of(self, tenant: str, session_id: str) -> SessionFiles:
        """The files of a session."""
        return SessionFiles(self._folder / _name(tenant), session_id)

    def sweep(self) -> int:
        """Remove the files of sessions that ended without their client. Returns the number of sessions."""
        before, count = time.time() - self._kept_s, 0
        for folder in self._folder.glob("*/sessions/*"):
            with contextlib.suppress(OSError):
                if folder.stat().st_mtime < before:
                    files = SessionFiles(folder.parent.parent, "")
                    files.folder = folder
                    files.remove()
                    count += 1
        return count


def chunks_of(data: memoryview) -> list[memoryview]:
    """The chunks of a buffer's bytes."""
    return [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]


def _name(text: str) -> str:
    """The name of a folder for any text."""
    return chunk_digest(text.encode()).hex()[:32]
