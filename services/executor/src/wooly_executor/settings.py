"""Settings of the executor's process, from the variables WOOLY_EXECUTOR_*."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from wooly_bus import host
from wooly_bus.channel import Endpoint, StrangerLimits
from wooly_wis.messages import Id

from wooly_executor.billing.core_speed import CoreSpeed
from wooly_executor.checkpoints.encryption import Secret
from wooly_executor.checkpoints.files import Checkpoints
from wooly_executor.errors import CheckpointError
from wooly_executor.host_account import HostLimits
from wooly_executor.memory.swap import Policy
from wooly_executor.vram import SwapSettings
from wooly_executor.weights.pinned_files import PinnedFiles

PREFIX = "WOOLY_EXECUTOR_"
#: Variable with the cluster's percentage. It is the default until an administrator configures another value.
DEFAULT_OVERCOMMIT = "CONTROLLER_DEFAULT_VRAM_OVERCOMMIT_PERCENT"
#: A CPU device leaves this part of the host's memory, one in so many, to the executor and to running operators.
OWN_PART = 8
#: URL of a folder of this machine.
LOCAL = "file://"
ANY_ADDRESS = ("0.0.0.0", "::")


def _state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "wooly" / "executor"


def _secret(name: str, value: SecretStr) -> Secret | None:
    """The secret of a setting; None: it is empty.

    Raises:
        CheckpointError: the setting has no key.
    """
    text = value.get_secret_value()
    try:
        return Secret.read(text) if text else None
    except (ValueError, OSError) as e:
        raise CheckpointError(f"{PREFIX}{name} cannot be used: {e}") from e


class ExecutorSettings(BaseSettings):
    """Settings of an executor. Memory in bytes, times in seconds.

    `memory` limits the device's memory. On a CPU, the process takes at most `host_memory` in all. A large allocation leaves
    `reserve` bytes free if sessions that were idle for `swap_idle_s` can be swapped out: to `swap_host` bytes of host memory
    first, then to `swap_disk` bytes in `swap_dir`.
    `device` is the number of the GPU among those that the process sees; one executor serves one GPU.
    `max_elements` and `max_flops` bound the work of one library call; without them, the device's defaults apply.
    `channel_key` is the public key of the only router that may open sessions; empty: any router may.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, populate_by_name=True)

    nats_url: str = "nats://127.0.0.1:4222"
    id: Id = Field(default_factory=lambda: f"{socket.gethostname().split('.')[0]}-0")
    node: str = Field(default_factory=socket.gethostname)
    runtime: Literal["auto", "cuda", "hip", "opencl", "torch_cpu"] = "auto"
    device: int = Field(default=0, ge=0, le=255)
    token: str = Field(
        default="",
        max_length=128,
        description="standalone executor: the token with which clients open sessions; empty: one is made and kept in a file of "
        "`state_dir`",
    )
    busy_wait_us: int = Field(
        default=200,
        ge=0,
        le=10_000,
        description="microseconds for which the device's thread, after an answer, looks for a client's frame before it blocks, "
        "if the last such wait was shorter and no other thread wants the core; 0, or with one core: it blocks at once",
    )
    plans: bool = Field(default=True, description="0: programs run without generated kernels")
    plan_trials: bool = Field(
        default=True,
        description="a new plan is measured against the library and used only if it is not slower; 0: used at once",
    )
    core_profiles: bool = Field(
        default=False,
        description="1: a GPU profiles one in 64 runs of each program, to bill the cores that the library's kernels occupy; 0: "
        "their device time is billed as one core. Off by default, because what a profile costs on a GPU is not measured yet",
    )
    graphs: bool = Field(
        default=True,
        description="1: a GPU replays steady parts of programs as graphs, for which it keeps an eighth of its memory; 0: it "
        "does not",
    )
    libraries: str | None = Field(
        default=None,
        description="comma-separated import names of extension libraries whose operators programs may call; by default "
        "torchvision if it is installed; empty: no library",
    )
    stateless_libraries: str = Field(
        default="",
        description="comma-separated import names of those of `libraries` whose operators keep nothing between calls, so that "
        "sessions that call them can go on in another executor",
    )
    listen: str = ""
    advertise: str = ""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    channel_key: str = ""
    peers_ca: Path | None = Field(
        default=None,
        description="file with the certificate authorities of other executors, for collectives of ranks on several executors; by "
        "default those of the system",
    )
    strangers: int = Field(default=256, ge=1, le=65536)
    strangers_per_peer: int = Field(default=64, ge=1, le=65536)
    hello_s: float = Field(default=10.0, gt=0, le=600)
    spare_descriptors: int = Field(default=64, ge=1, le=65536)
    shared_memory: int = Field(
        default=256 << 20,
        ge=0,
        le=1 << 32,
        description="maximum bytes of memory that one session on this host shares with the executor for uploads, downloads and "
        "pinned tensors, at least 32 MiB; 0: all data passes through the socket",
    )
    shared_memory_total: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="the same limit for all sessions together, by default a quarter of `host_memory`; the data of sessions above "
        "it passes through the socket",
    )
    tunnels: int = Field(default=64, ge=1, le=65536)
    tunnels_per_tenant: int = Field(default=16, ge=1, le=65536)
    state_dir: Path = Field(default_factory=_state_dir)
    memory: Annotated[int, Field(ge=256, lt=1 << 63)] | None = None
    host_memory: int = Field(default_factory=host.memory, ge=256 << 20, lt=1 << 63)
    reserve: int = Field(default=2 << 30, ge=0)
    large_allocation: int = Field(default=16 << 20, ge=1)
    swap_idle_s: float = Field(default=300.0, ge=0)
    preempt_memory: bool = Field(
        default=True,
        description="1: a session of class P0 or P1 that needs memory takes it from a session of a lower class between two of "
        "its programs; 0: it gets memory only of sessions that were idle for `swap_idle_s`",
    )
    swap_patience_s: float = Field(default=10.0, ge=0)
    swap_host: Annotated[int, Field(ge=0)] | None = None
    swap_disk: int = Field(default=16 << 30, ge=0)
    swap_dir: Path | None = None
    pins_disk: int = Field(
        default=64 << 30,
        ge=0,
        description="maximum bytes of disk, in `state_dir`, for pinned weights (`wooly weights add`), so that they survive the "
        "process; 0: they are lost with it",
    )
    checkpoints: str = Field(
        default="",
        description="folder, or URL of an object store (`s3://bucket/prefix`, `nats://host:4222/BUCKET`), of the checkpoints "
        "from which sessions go on in another executor, by default a folder in `state_dir`; executors that may replace each "
        "other need the same place; `off`: no checkpoints",
    )
    checkpoint_key: SecretStr = Field(
        default=SecretStr(""),
        description="key with which checkpoints are encrypted: 64 hexadecimal digits, 32 bytes in base64, or the path of a file "
        "with either (`python -m wooly_bus.authority` makes `checkpoint.key`); executors that may replace each other need the "
        "same key; empty: they are not encrypted",
    )
    checkpoint_key_earlier: SecretStr = Field(
        default=SecretStr(""),
        description="another key, in one of the forms of `checkpoint_key`, with which checkpoints are only read: the former key "
        "while keys are changed; empty: there is none",
    )
    checkpoint_host: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="maximum bytes of host memory for checkpoints of all sessions until they are stored, by default an eighth of "
        "`host_memory`",
    )
    checkpoints_kept_s: float = Field(
        default=86400.0,
        gt=0,
        description="seconds for which checkpoints remain after the end of a session that its client did not close",
    )
    silence_s: float = Field(
        default=3600.0,
        ge=0,
        description="seconds for which a session outlives its lease while its client's connection is open: the client is stopped "
        "(Ctrl-Z, a debugger), its machine sleeps, or no router runs",
    )
    drain_s: float = Field(
        default=0.0,
        ge=0,
        description="seconds for which an executor that receives SIGTERM waits until its sessions have gone on elsewhere",
    )
    overcommit_percent: int = Field(
        default=0, ge=0, le=1000, validation_alias=AliasChoices(f"{PREFIX}OVERCOMMIT_PERCENT", DEFAULT_OVERCOMMIT)
    )
    answers: int = Field(
        default=16 << 20,
        ge=1 << 20,
        description="maximum bytes of unread answers of one session; above it, no other frame of the session is processed "
        "until the client reads",
    )
    answers_s: float = Field(
        default=30.0,
        gt=0,
        description="seconds for which a session waits for a client that reads none of its answers; then the session ends",
    )
    definitions: int = Field(
        default=512 << 20,
        ge=1 << 20,
        description="maximum bytes of host memory of one session's decoded programs (1 to 3 KiB per instruction); above it, the "
        "least recently used programs are forgotten",
    )
    session_host: int = Field(
        default=1 << 30,
        ge=1 << 20,
        description="maximum bytes of host memory of one session without its buffers (queue, answers, programs, sources); above "
        "it, the session ends",
    )
    sessions_host: Annotated[int, Field(ge=1 << 20)] | None = Field(
        default=None,
        description="the same limit for all sessions together, by default a sixteenth of `host_memory` and at least 256 MiB; "
        "above it, the largest session of the tenant with the most memory ends",
    )
    decode_s: float = Field(
        default=10.0,
        gt=0,
        description="maximum core time, in seconds, to decode and check one definition or the module of one job",
    )
    programs: int = Field(
        default=256 << 20,
        ge=0,
        description="maximum bytes of host memory for cached programs that no session has any more, so that a later definition "
        "is quick; half as much is for their forms",
    )
    dispatch: Literal["fair", "fifo"] = "fair"
    undeclared_percent: int = Field(default=20, ge=0, le=100)
    withheld_percent: int = Field(
        default=25,
        ge=0,
        le=90,
        description="maximum percent of the time for which the device stays idle, at most 2 ms at once, although P2, P3 or P4 "
        "has work, because a P0 or P1 session that computes in a rhythm will probably send its next program before that work "
        "would end; 0: never",
    )
    heartbeat_s: float = Field(default=1.0, gt=0)
    compiler_timeout_s: float = Field(default=20.0, gt=0)
    kernel_s: float = Field(default=10.0, gt=0)
    max_elements: Annotated[int, Field(ge=1)] | None = None
    max_flops: Annotated[int, Field(ge=1)] | None = None
    pace: Literal["best", "off"] | Annotated[int, Field(ge=1_000, le=1_000_000)] = "best"

    def extension_libraries(self) -> list[str] | None:
        """Import names of the extension libraries; None: the default."""
        if self.libraries is None:
            return None
        return _names(self.libraries)

    def without_state(self) -> frozenset[str]:
        """Import names of the extension libraries whose operators keep nothing between calls."""
        return frozenset(_names(self.stateless_libraries))

    def device_memory(self, capacity: int | None) -> int:
        """Bytes of the device: as configured, else its `capacity`, else a CPU device's part of the host's memory."""
        return self.memory or capacity or self.host_memory - self.host_memory // OWN_PART

    def swap(self, taken: int = 0) -> SwapSettings:
        """Settings of swapping. `taken`: bytes of host memory that the device itself uses."""
        swap_host = self.swap_host
        if swap_host is None:
            swap_host = max(min(self.host_memory // 4, (self.host_memory - taken) // 2), 0)
        policy = Policy(self.reserve, self.large_allocation, int(self.swap_idle_s * 1e9), self.preempt_memory)
        folder = self.swap_dir or self.state_dir / "swap"
        return SwapSettings(policy, swap_host, self.swap_disk, folder, int(self.swap_patience_s * 1e9))

    def pinned_files(self) -> PinnedFiles | None:
        """Where pinned weights are saved; None: nowhere."""
        return PinnedFiles(self.state_dir / "pins" / self.id, self.pins_disk) if self.pins_disk else None

    def checkpoint_files(self) -> Checkpoints | None:
        """Where checkpoints are stored; None: nowhere.

        Raises:
            CheckpointError: the place or the key cannot be used.
        """
        if self.checkpoints == "off":
            return None
        secret = _secret("CHECKPOINT_KEY", self.checkpoint_key)
        earlier = _secret("CHECKPOINT_KEY_EARLIER", self.checkpoint_key_earlier)
        if "://" not in self.checkpoints or self.checkpoints.startswith(LOCAL):
            folder = self.checkpoints.removeprefix(LOCAL) or self.state_dir / "checkpoints"
            return Checkpoints(Path(folder), self.checkpoints_kept_s, secret, earlier)
        from wooly_executor.checkpoints.objects import ObjectStore  # fsspec is loaded only where it is used

        store = ObjectStore(self.checkpoints, "" if secret is None else secret.id)
        return Checkpoints(store, self.checkpoints_kept_s, secret, earlier)

    def limits(self) -> HostLimits:
        """Limits of the host memory that sessions use."""
        executor = self.sessions_host or max(self.host_memory // 16, 256 << 20)
        checkpoints = self.host_memory // 8 if self.checkpoint_host is None else self.checkpoint_host
        return HostLimits(
            self.answers,
            self.answers_s,
            self.definitions,
            self.session_host,
            executor,
            self.decode_s,
            self.programs,
            checkpoints,
        )

    def paced(self) -> CoreSpeed | None:
        """The measurement of a CPU's speed; None: it is switched off."""
        if self.pace == "off":
            return None
        return CoreSpeed(None if self.pace == "best" else self.pace)

    def stranger_limits(self) -> StrangerLimits:
        """Limits of connections that have not sent a valid hello."""
        total = self.host_memory // 4 if self.shared_memory_total is None else self.shared_memory_total
        return StrangerLimits(
            self.strangers,
            self.strangers_per_peer,
            self.hello_s,
            self.spare_descriptors,
            self.shared_memory,
            total,
        )

    def endpoints(self) -> list[str]:
        """The endpoints to listen at: as configured, or a unix socket in the state directory."""
        return _parts(self.listen) or [f"unix://{self.state_dir}/{self.id}.sock"]

    def advertised(self, bound: list[Endpoint]) -> list[str]:
        """The endpoints that clients get: as configured, or the bound ones with the node's name for a wildcard address."""
        if self.advertise:
            return _parts(self.advertise)
        return [str(replace(e, host=self.node) if e.host in ANY_ADDRESS else e) for e in bound]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def complaints(error: ValidationError) -> list[str]:
    """One line per invalid setting: variable, value, and what is required."""
    return [
        f"{PREFIX}{str(e['loc'][0]).upper().removeprefix(PREFIX)}={e['input']!s}: {e['msg']}" for e in error.errors()
    ]
