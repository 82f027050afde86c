"""Messages about a job: its submission, its start on an executor, its end."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from wooly_wis.messages.base import Bytes, Digest, Id, Message, Name, SessionId
from wooly_wis.messages.blobs import Blob
from wooly_wis.messages.sessions import SessionPolicy

#: The id of a job. The submitting client chooses it at random, so that it is unique.
JobId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{8,48}$")]


class SubmitJob(Message):
    """Run a module (command to the router, over JetStream).

    After the acknowledgement, the router runs the job or reports why it cannot. Module, constants and inputs are blobs of the
    tenant. A repeated command with the same `job_id` has no further effect.

    Attributes:
        module: digest of the module's bytes.
        inputs: a blob for each input of the module's signature.
        required_vram: bytes of device memory; None: the size of the module's buffers.
        noswap: the job must not be swapped out.
        deadline_s: the job fails this many seconds after its submission.
        attempts: maximum number of attempts if executors are lost; None: the cluster's default.
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
    """The router has stored the job. It will run the job or report why it cannot."""

    job_id: JobId


class JobOutput(Message):
    """A result of a job: a dense tensor, in a blob of the tenant. `dtype`: the label in WIS."""

    name: str = Field(max_length=255)
    dtype: str
    sizes: tuple[int, ...] = Field(max_length=64)
    digest: Digest
    nbytes: Bytes


class RunJobRequest(Message):
    """Run a job (router to executor). The job runs as the session `session_id`; a `JobEnded` reports its end."""

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
    """The executor accepted the job."""


class JobEnded(Message):
    """An attempt to run a job ended (event, in JetStream).

    `state` is `lost` if the cause was not the job, for example a lost executor; then another attempt may succeed.
    """

    task_id: SessionId
    attempt: int = Field(ge=1)
    executor_id: Id
    state: Literal["completed", "failed", "lost"]
    reason: str = Field(default="", max_length=4096)
    outputs: tuple[JobOutput, ...] = Field(default=(), max_length=4096)
