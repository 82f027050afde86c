"""Checkpoints in a folder.

    <folder>/[key-<id>/]<tenant>/chunks/<name>           a chunk that sessions of the tenant share
    <folder>/[key-<id>/]<tenant>/sessions/<session>/     a hard link to each chunk that the session needs, and `cut-<number>.json`

The file system counts the references to a chunk: a chunk with a single link belongs to no session and is removed, by `sweep` if
the executor dies before. Several executors, and executors of several machines with a common file system, may use one folder at
the same time. Files are not synced to the disk: they survive the process, and not a power cut.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from wooly_bus.contents import CHUNK

from wooly_executor.checkpoints.encryption import Pieces

T = TypeVar("T")
R = TypeVar("R")
#: Bytes of the disk that must stay free.
LEFT_FREE = 1 << 30
#: Chunks that are read at a time. Reading a chunk is copying and hashing, which threads do without the interpreter's lock.
READERS = 4
#: Chunks of one call of `read_each`. After it the readers wait for the slowest, which with 4 chunks costs a fifth of the time.
READ_TOGETHER = 16
#: Beginning of the names of folders whose content is encrypted; the id of the key follows.
KEYED = "key-"


class FolderSession:
    """The files of one session. See `SessionStore`.

    Args:
        folder: folder of all checkpoints.
        tenant: folder of the session's tenant.
        session: name of the session's folder.
    """

    def __init__(self, folder: Path, tenant: Path, session: str) -> None:
        self._root = folder
        self._pool = tenant / "chunks"
        self._own = tenant / "sessions" / session

    def keep(self, name: str, nbytes: int, content: Callable[[], Pieces]) -> None:
        """See `SessionStore`."""
        own, shared = self._own / name, self._pool / name
        if own.exists():
            return
        try:
            os.link(shared, own)
            return
        except FileNotFoundError:
            self._pool.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._own.mkdir(parents=True, exist_ok=True, mode=0o700)
        if shutil.disk_usage(self._pool).free < nbytes + LEFT_FREE:
            raise OSError(f"the disk of {self._root} is almost full")
        new = self._own / f"{name}.new"
        _write(new, content())
        with contextlib.suppress(FileExistsError):
            os.link(new, shared)
        new.rename(own)

    def fill(self, name: str, into: memoryview) -> int:
        """See `SessionStore`."""
        with (self._own / name).open("rb", buffering=0) as file:
            at = 0
            while at < len(into) and (n := file.readinto(into[at:])):
                at += n
            return os.fstat(file.fileno()).st_size if at == len(into) else at

    def drop(self, names: Iterable[str]) -> None:
        """See `SessionStore`."""
        for name in names:
            (self._own / name).unlink(missing_ok=True)
            _remove_unused(self._pool / name)

    def lists(self) -> list[int]:
        """See `SessionStore`."""
        return [int(path.stem.removeprefix("cut-")) for path in self._own.glob("cut-*.json")]

    def _list(self, number: int) -> Path:
        return self._own / f"cut-{number}.json"

    def put_list(self, number: int, content: Pieces) -> None:
        """See `SessionStore`."""
        self._own.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = self._own / f"cut-{number}.new"
        _write(new, content)
        new.rename(self._list(number))

    def get_list(self, number: int) -> bytes:
        """See `SessionStore`."""
        return self._list(number).read_bytes()

    def drop_lists(self, numbers: Iterable[int]) -> None:
        """See `SessionStore`."""
        for number in numbers:
            self._list(number).unlink(missing_ok=True)

    def touch(self) -> None:
        """See `SessionStore`."""
        with contextlib.suppress(OSError):
            os.utime(self._own)

    def remove(self) -> None:
        """See `SessionStore`."""
        with contextlib.suppress(FileNotFoundError):
            names = [entry.name for entry in os.scandir(self._own)]
            lists = [name for name in names if "." in name]  # and files that were not finished
            for name in lists:
                (self._own / name).unlink(missing_ok=True)
            self.drop([name for name in names if "." not in name])
            self._own.rmdir()


class FolderStore:
    """Checkpoints in a folder. See `Store`.

    Args:
        folder: the folder. It is made when the first cut is stored.
        key: id of the key with which everything is encrypted; empty: nothing is.
    """

    at_once, read_at_once = CHUNK, READ_TOGETHER * CHUNK

    def __init__(self, folder: Path, key: str = "") -> None:
        self._folder, self._key = folder, key
        self._readers = concurrent.futures.ThreadPoolExecutor(READERS, "wooly-restores")

    def identity(self) -> str:
        """See `Store`. The first call makes the folder, and its name in the file `id`."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / "id"
        if not path.exists():
            new = self._folder / f"id-{secrets.token_hex(8)}.new"
            new.write_text(secrets.token_hex(16))
            with contextlib.suppress(FileExistsError):  # another executor was first
                os.link(new, path)
            new.unlink()
        return path.read_text()

    def keyed(self, key: str) -> FolderStore:
        """See `Store`."""
        other = copy.copy(self)
        other._key = key
        return other

    def session(self, tenant: str, session: str) -> FolderSession:
        """See `Store`."""
        keyed = self._folder / f"{KEYED}{self._key}" if self._key else self._folder
        return FolderSession(self._folder, keyed / tenant, session)

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """See `Store`. One at a time: the disk and the core are busy with one."""
        return [work(item) for item in items]

    def read_each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """See `Store`. Several at a time: a session and its script wait for a restore."""
        runs = [self._readers.submit(work, item) for item in items]
        concurrent.futures.wait(runs)
        return [run.result() for run in runs]

    def sweep(self, before: float) -> int:
        """See `Store`. It removes sessions of all keys, and chunks that an executor left that died inside `drop`."""
        count = 0
        for pattern in ("*/sessions/*", f"{KEYED}*/*/sessions/*"):
            for folder in self._folder.glob(pattern):
                with contextlib.suppress(OSError):
                    if folder.stat().st_mtime < before:
                        FolderSession(self._folder, folder.parent.parent, folder.name).remove()
                        count += 1
        for pattern in ("*/chunks/*", f"{KEYED}*/*/chunks/*"):
            for chunk in self._folder.glob(pattern):
                _remove_unused(chunk)
        return count

    def others(self) -> list[str]:
        """See `Store`."""
        plain = bool(self._key) and any(self._folder.glob("*/sessions/*"))
        keys = {path.parts[-4].removeprefix(KEYED) for path in self._folder.glob(f"{KEYED}*/*/sessions/*")}
        return [""] * plain + sorted(keys - {self._key})

    def close(self) -> None:
        """See `Store`."""
        self._readers.shutdown(wait=False, cancel_futures=True)


def _remove_unused(chunk: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if chunk.stat().st_nlink == 1:
            chunk.unlink()


def _write(path: Path, content: Pieces) -> None:
    with path.open("wb", buffering=0) as file:
        for piece in content:
            rest = memoryview(piece)
            while len(rest):
                rest = rest[file.write(rest) :]
