"""The state of the cuts of one session."""

from __future__ import annotations

from dataclasses import dataclass, field

from wooly_wis.messages import StoredCheckpoint

from wooly_executor.billing.usage import Mark
from wooly_executor.checkpoints.files import SessionFiles, Table
from wooly_executor.checkpoints.jobs import StoreJob
from wooly_executor.errors import ExecutorError


@dataclass(eq=False)
class SessionCuts:
    """The cuts of one session.

    Attributes:
        files: their files.
        changed: buffers that may have changed since the last cut.
        table: the buffers of the last stored cut.
        number: number of the last cut that was taken.
        kept: number of the last cut that is stored.
        copying: the cut whose buffers are being copied; 0: none.
        storing: the job that stores the last cut.
        staged: bytes of host memory that the last cut uses until it is stored.
        used: what the session had used when the last cut was taken; None: no cut was taken.
        pause_ns: how long the session waited for the last cut.
        store_ns: how long storing the last cut took.
        stored: figures of the last stored cut; None: none is stored.
        error: why the last cut is not stored; empty if it is, or is being stored.
        logged: why an earlier cut was not stored, as the log says; empty: a later one was stored.
        waits: the session's next frame waits until the last cut is stored.
        restoring: the restore in progress; None: there is none.
    """

    files: SessionFiles
    changed: set[int] = field(default_factory=set)
    table: Table = field(default_factory=dict)
    number: int = 0
    kept: int = 0
    copying: int = 0
    storing: StoreJob | None = None
    staged: int = 0
    used: Mark | None = None
    pause_ns: int = 0
    store_ns: int = 0
    stored: StoredCheckpoint | None = None
    error: str = ""
    logged: str = ""
    waits: bool = False
    restoring: Restoring | None = None


@dataclass(eq=False)
class Restoring:
    """A restore. `table` is None until it was read, from the files `holder`. `error`: why it failed. `done`: the session has its
    buffers.
    """

    holder: SessionFiles | None = None
    table: Table | None = None
    error: ExecutorError | None = None
    done: bool = False
