"""A job's way: submitted, given to an executor, ended."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from wooly_wis.messages.base import Bytes, Digest, Id, Message, Name, SessionId
from wooly_wis.messages.blobs import Blob
from wooly_wis.messages.sessions import SessionPolicy

#: The id of a job, chosen by who submits it: random, for nobody else may have it.
JobId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{8,48}$")]


class SubmitJob(Message):
    """Run a module (command to the router, over JetStream: once it is acknowledged, it will be run or the reason told).

    Module, constants and inputs are blobs of the tenant's. Sent again with the same `job_id`, it changes nothing.

    Attributes:
        module: digest of the module's bytes.
        inputs: a blob for each input of its signature.
        required_vram: bytes; what the module's buffers need if not given.
        noswap: it must not be swapped out.
        deadline_s: seconds from its submission after which it fails.
        attempts: how often it is tried if executors are lost; None: as the cluster says.
    """

    job_id: JobId
    tenant: Name = "default"
    credential: str = Field(default="", max_length=65536)
    name: str = Field(default="", max_length=1024)
    module: Digest
    inputs: tuple[Blob, ...] = Field(default=(), max_length=4096)
    priority: int = Field(default=2, ge=0, le=4)
    weight: int = Field(default=1, ge=1, le=1 << 20)
    required_vram: int | None = Field(default=None, gt=0, lt=1 << 63)
    gpu_mode: Literal["shared", "exclusive"] = "shared"
    node_groups: tuple[Name, ...] = Field(default=(), max_length=64)
    vendor: str = Field(default="", max_length=64)
    arch: str = Field(default="", max_length=64)
    noswap: bool = False
    deadline_s: float | None = Field(default=None, gt=0, le=1e9, allow_inf_nan=False)
    attempts: int | None = Field(default=None, ge=1, le=100)


class SubmitJobReply(Message):
    """A job that is kept; once this is said, it will be run or the reason told."""

    job_id: JobId


class JobOutput(Message):
    """A result of a job: a dense tensor, in a blob of the tenant's. `dtype` by its label in WIS."""

    name: str = Field(max_length=255)
    dtype: str
    sizes: tuple[int, ...] = Field(max_length=64)
    digest: Digest
    nbytes: Bytes


class RunJobRequest(Message):
    """The router gives an executor a job. It is a session of its own there, called `session_id`, and ends with a `JobEnded`."""

    task_id: SessionId
    attempt: int = Field(ge=1)
    session_id: SessionId
    tenant: Name
    module: Digest
    inputs: tuple[Blob, ...] = Field(default=(), max_length=4096)
    policy: SessionPolicy
    quota: int | None = Field(default=None, gt=0, lt=1 << 63)
    swap: bool = True
    overcommit_vram_percent: int | None = Field(default=None, ge=0, le=1000)
    opaque_kernels: bool = False


class RunJobReply(Message):
    """The executor took it."""


class JobEnded(Message):
    """How an attempt at a job ended (event, in JetStream). `lost`: through no fault of its own; another attempt may do better."""

    task_id: SessionId
    attempt: int = Field(ge=1)
    executor_id: Id
    state: Literal["completed", "failed", "lost"]
    reason: str = Field(default="", max_length=4096)
    outputs: tuple[JobOutput, ...] = Field(default=(), max_length=4096)
