"""Messages about tasks (sessions and jobs): state, history, lists."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from wooly_wis.messages.base import Host, Id, Message, Name, SessionId
from wooly_wis.messages.jobs import JobOutput
from wooly_wis.messages.memory import StoredCheckpoint

TaskState = Literal["pending", "started", "hibernated", "completed", "failed", "cancelled"]


class TaskChanged(Message):
    """One step in the history of a task (event, in JetStream). `number` counts the steps from 1. `at`: seconds since the
    epoch.
    """

    task_id: SessionId
    tenant: Name
    kind: Literal["session", "job"]
    name: str = Field(default="", max_length=1024)
    number: int = Field(ge=1)
    at: float
    state: TaskState
    reason: str = Field(default="", max_length=4096)
    outputs: tuple[JobOutput, ...] = ()


class TaskInfo(Message):
    """A task: a session or a job. Times are in seconds since the epoch.

    `placement`: why the task runs where it runs, or why it waits; see `wooly_router.core.placement`. `gang`: of a rank of a
    program of several processes: the id of the task that all its ranks are; `rank`: its number; `ranks`: how many there are.
    """

    task_id: SessionId
    kind: Literal["session", "job"]
    tenant: Name
    name: str
    client_host: str
    state: TaskState
    reason: str
    priority: int
    gpu_mode: Literal["shared", "exclusive"]
    gpu_count: int
    required_vram: int | None
    noswap: bool
    node_groups: tuple[str, ...]
    executors: tuple[str, ...]
    nodes: tuple[str, ...]
    attempt: int
    created_at: float
    started_at: float | None
    ended_at: float | None
    deadline_at: float | None
    placement: dict[str, Any] = Field(default_factory=dict)
    outputs: tuple[JobOutput, ...] = ()
    gang: str = ""
    rank: int = 0
    ranks: int = 0


class TaskStep(Message):
    """One step in the history of a task."""

    number: int
    at: float
    state: TaskState
    reason: str


class TasksRequest(Message):
    """Ask the router for tasks, newest first. `after`: the cursor `next` of the previous page."""

    tenant: Name | None = None
    credential: str = Field(default="", max_length=65536)
    states: tuple[TaskState, ...] = ()
    kind: Literal["session", "job"] | None = None
    priority: int | None = Field(default=None, ge=0, le=4)
    executor_id: Id | None = None
    text: str | None = Field(default=None, max_length=256)
    limit: int = Field(default=100, ge=1, le=200)
    after: str = Field(default="", max_length=128)


class TasksReply(Message):
    """A page of tasks. `next`: cursor of the next page; empty at the end."""

    tasks: tuple[TaskInfo, ...]
    next: str = ""


class TaskRequest(Message):
    """Show or cancel one task."""

    task_id: SessionId
    tenant: Name | None = None
    credential: str = Field(default="", max_length=65536)
    reason: str = Field(default="", max_length=1024)


class TaskReply(Message):
    """A task and its history. `checkpoint`: the newest checkpoint of a session that runs. `ranks`: if the task is a program of
    several processes, the sessions of its ranks.
    """

    task: TaskInfo
    story: tuple[TaskStep, ...] = ()
    checkpoint: StoredCheckpoint | None = None
    ranks: tuple[TaskInfo, ...] = Field(default=(), max_length=1024)


class MoveTaskRequest(Message):
    """Move a running session to another device.

    `node`: the node, executor, group of nodes or vendor to use from now on; empty: as before.
    """

    task_id: SessionId
    tenant: Name | None = None
    credential: str = Field(default="", max_length=65536)
    node: Host = ""


class PrioritizeTaskRequest(Message):
    """Change the class of a task, in the queue and on its devices."""

    task_id: SessionId
    tenant: Name | None = None
    credential: str = Field(default="", max_length=65536)
    priority: int = Field(ge=0, le=4)
