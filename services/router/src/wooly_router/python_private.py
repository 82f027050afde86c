"""The private names of libraries that the router uses, in one file. Checked against aiosqlite 0.22."""

from __future__ import annotations

import threading

import aiosqlite


def worker_of(connection: aiosqlite.Connection) -> threading.Thread:
    """The thread in which a connection's operations run."""
    return connection._thread
