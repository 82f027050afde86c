"""Files of a service are for its own user alone: state, ledgers, sockets, logs, keys."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def keep_private(folder: Path, *ours: str) -> None:
    """Make a state folder if need be, and let nobody but this user read what this process makes from now on.

    Sets the umask, so that what libraries make (SQLite's `-wal`, NATS's stores, PoCL's cache) is private too.

    Args:
        folder: where the state is. One that exists keeps its mode: it may be a folder of many uses.
        ours: patterns of names in it, of files and folders that earlier versions made for others to read: they are taken back.

    Raises:
        OSError: the folder cannot be made, or belongs to another user than this one or root.
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
    """Use no folder of another user's: what is read and written there would be theirs.

    Raises:
        OSError: it belongs to another user than this one or root, or does not exist.
    """
    owner = folder.stat().st_uid
    if owner not in (0, os.geteuid()):
        raise PermissionError(f"the state folder {folder} belongs to user {owner}, who could put files of theirs in it")


def _tighten(path: Path) -> None:
    """Take from others what they may do with a file, a folder or a socket of this user's; a symbolic link is left alone."""
    try:
        found = path.lstat()
        if not stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & 0o077:
            path.chmod(stat.S_IMODE(found.st_mode) & 0o700)
    except FileNotFoundError:
        return  # it was removed meanwhile
