"""Sessions and jobs alike, as tasks: their state, their story, lists of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from wooly_wis.messages.base import Id, Message, Name, SessionId
from wooly_wis.messages.jobs import JobOutput

TaskState = Literal["pending", "started", "completed", "failed", "cancelled"]


class TaskChanged(Message):
    """One step of a task's story (event, in JetStream). `number` counts its steps from 1; `at`: seconds since the epoch."""

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
    """A session or a job. Times in seconds since the epoch.

    `placement` says why it is where it is, or why it waits; see `wooly_router.core.placement`.
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


class TaskStep(Message):
    """One step of a task's story."""

    number: int
    at: float
    state: TaskState
    reason: str


class TasksRequest(Message):
    """Ask the router for tasks, newest first. `after`: the cursor of the page before."""

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
    """A page of tasks. With a `next`, there is more."""

    tasks: tuple[TaskInfo, ...]
    next: str = ""


class TaskRequest(Message):
    """One task: tell of it, or cancel it."""

    task_id: SessionId
    tenant: Name | None = None
    credential: str = Field(default="", max_length=65536)
    reason: str = Field(default="", max_length=1024)


class TaskReply(Message):
    """A task and its story."""

    task: TaskInfo
    story: tuple[TaskStep, ...] = ()


class PrioritizeTaskRequest(Message):
    """Give a task another class, in the queue and on its devices."""

    task_id: SessionId
    tenant: Name | None = None
    credential: str = Field(default="", max_length=65536)
    priority: int = Field(ge=0, le=4)
