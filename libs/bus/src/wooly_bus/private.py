"""Restricts the files of a service (state, ledgers, sockets, logs, keys) to its own user."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def keep_private(folder: Path, *ours: str) -> None:
    """Create a state folder if it is missing. From now on, only this user can read the files that this process creates.

    Sets the umask, so that files of libraries (SQLite's `-wal`, NATS's stores, PoCL's cache) are private, too.

    Args:
        folder: the state folder. A folder that exists keeps its mode, because it may have other uses.
        ours: name patterns in the folder of files and folders that earlier versions made readable for other users. Their modes
            are corrected.

    Raises:
        OSError: the folder cannot be created, or its owner is neither this user nor root.
    """
    os.umask(0o077)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    refuse_foreign(folder)
    for pattern in ours:
        for found in folder.glob(pattern):
            _tighten(found)
            if found.is_dir() and not found.is_symlink():
                for path, folders, files in os.walk(found):
                    for name in (*folders, *files):
                        _tighten(Path(path, name))


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder of another user, because that user could replace the files in it.

    Raises:
        OSError: the owner is neither this user nor root, or the folder does not exist.
    """
    owner = folder.stat().st_uid
    if owner not in (0, os.geteuid()):
        raise PermissionError(
            f"the state folder {folder} belongs to user {owner}, who could replace the files in it; use a folder of your own user"
        )


def _tighten(path: Path) -> None:
    """Remove the permissions of group and others from a file, folder or socket of this user. Ignore symbolic links."""
    try:
        found = path.lstat()
        if not stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & 0o077:
            path.chmod(stat.S_IMODE(found.st_mode) & 0o700)
    except FileNotFoundError:
        return  # the file was removed meanwhile
