"""Settings of the executor's process, from WOOLY_EXECUTOR_* variables."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from wooly_bus import host
from wooly_bus.channel import Endpoint, StrangerLimits
from wooly_wis.messages import Id

from wooly_executor.core_speed import CoreSpeed
from wooly_executor.host_account import HostLimits
from wooly_executor.memory.swap import Policy
from wooly_executor.vram import SwapSettings

PREFIX = "WOOLY_EXECUTOR_"
#: The cluster's percentage, until somebody configures another.
DEFAULT_OVERCOMMIT = "CONTROLLER_DEFAULT_VRAM_OVERCOMMIT_PERCENT"
#: The part of the host's memory that is no CPU device's, but the executor's own and an operator's while it runs: one in so many.
OWN_PART = 8
ANY_ADDRESS = ("0.0.0.0", "::")


def _state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "wooly" / "executor"


class ExecutorSettings(BaseSettings):
    """What an executor needs to know. Memory in bytes, times in seconds.

    `memory` is the device's, where it is not to be all of it. On a CPU the process may take `host_memory` in all. A large
    allocation leaves `reserve` free, if sessions idle for `swap_idle_s` can be swapped out for it: to `swap_host` bytes of host
    memory, then to `swap_disk` bytes in `swap_dir`.
    `device` is the number of the GPU among those that the process sees: one executor serves one.
    `max_elements` and `max_flops` bound the work of one call of the library, where the device's defaults are not to.
    `channel_key` is the public key of the router, if no other may open sessions here.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, populate_by_name=True)

    nats_url: str = "nats://127.0.0.1:4222"
    id: Id = Field(default_factory=lambda: f"{socket.gethostname().split('.')[0]}-0")
    node: str = Field(default_factory=socket.gethostname)
    runtime: Literal["auto", "cuda", "hip", "opencl", "torch_cpu", "reference"] = "auto"
    device: int = Field(default=0, ge=0, le=255)
    listen: str = ""
    advertise: str = ""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    channel_key: str = ""
    strangers: int = Field(default=256, ge=1, le=65536)
    strangers_per_peer: int = Field(default=64, ge=1, le=65536)
    hello_s: float = Field(default=10.0, gt=0, le=600)
    spare_descriptors: int = Field(default=64, ge=1, le=65536)
    tunnels: int = Field(default=64, ge=1, le=65536)
    tunnels_per_tenant: int = Field(default=16, ge=1, le=65536)
    state_dir: Path = Field(default_factory=_state_dir)
    memory: Annotated[int, Field(ge=256, lt=1 << 63)] | None = None
    host_memory: int = Field(default_factory=host.memory, ge=256 << 20, lt=1 << 63)
    reserve: int = Field(default=2 << 30, ge=0)
    large_allocation: int = Field(default=16 << 20, ge=1)
    swap_idle_s: float = Field(default=300.0, ge=0)
    swap_patience_s: float = Field(default=10.0, ge=0)
    swap_host: Annotated[int, Field(ge=0)] | None = None
    swap_disk: int = Field(default=16 << 30, ge=0)
    swap_dir: Path | None = None
    overcommit_percent: int = Field(
        default=0, ge=0, le=1000, validation_alias=AliasChoices(f"{PREFIX}OVERCOMMIT_PERCENT", DEFAULT_OVERCOMMIT)
    )
    answers: int = Field(
        default=16 << 20,
        ge=1 << 20,
        description="bytes of answers that wait for one session's client; with more, nothing else of the session is processed "
        "until the client reads",
    )
    answers_s: float = Field(
        default=30.0,
        gt=0,
        description="seconds after which a session ends whose client reads nothing of the answers that it waits for",
    )
    definitions: int = Field(
        default=512 << 20,
        ge=1 << 20,
        description="bytes of host memory that one session's programs may take once decoded (1 to 3 KiB per instruction); with "
        "more, the session forgets the programs that it used longest ago",
    )
    session_host: int = Field(
        default=1 << 30,
        ge=1 << 20,
        description="bytes of host memory that one session may take in all beside its buffers (queue, answers, programs, "
        "sources); a session with more ends",
    )
    sessions_host: Annotated[int, Field(ge=1 << 20)] | None = Field(
        default=None,
        description="the same of all sessions, by default a sixteenth of `host_memory`, at least 256 MiB; beyond it the largest "
        "session of the tenant that holds most ends",
    )
    decode_s: float = Field(
        default=10.0,
        gt=0,
        description="seconds of a core that decoding and checking one definition, or the module of one job, may take",
    )
    programs: int = Field(
        default=256 << 20,
        ge=0,
        description="bytes of host memory for programs that no session has any more: who defines one of them again waits for "
        "nothing. Half as much is for their forms",
    )
    dispatch: Literal["fair", "fifo"] = "fair"
    undeclared_percent: int = Field(default=20, ge=0, le=100)
    heartbeat_s: float = Field(default=1.0, gt=0)
    compiler_timeout_s: float = Field(default=20.0, gt=0)
    kernel_s: float = Field(default=10.0, gt=0)
    max_elements: Annotated[int, Field(ge=1)] | None = None
    max_flops: Annotated[int, Field(ge=1)] | None = None
    pace: Literal["best", "off"] | Annotated[int, Field(ge=1_000, le=1_000_000)] = "best"

    def device_memory(self, capacity: int | None) -> int:
        """Bytes of the device: as configured, else its `capacity`, else what of the host's memory a CPU device gets."""
        return self.memory or capacity or self.host_memory - self.host_memory // OWN_PART

    def swap(self, taken: int = 0) -> SwapSettings:
        """How memory is swapped, where the device itself has taken so many bytes of host memory."""
        swap_host = self.swap_host
        if swap_host is None:
            swap_host = max(min(self.host_memory // 4, (self.host_memory - taken) // 2), 0)
        policy = Policy(self.reserve, self.large_allocation, int(self.swap_idle_s * 1e9))
        folder = self.swap_dir or self.state_dir / "swap"
        return SwapSettings(policy, swap_host, self.swap_disk, folder, int(self.swap_patience_s * 1e9))

    def limits(self) -> HostLimits:
        """What sessions may make the host hold."""
        executor = self.sessions_host or max(self.host_memory // 16, 256 << 20)
        return HostLimits(
            self.answers, self.answers_s, self.definitions, self.session_host, executor, self.decode_s, self.programs
        )

    def paced(self) -> CoreSpeed | None:
        """How the pace of a CPU is measured; None: it is not."""
        if self.pace == "off":
            return None
        return CoreSpeed(None if self.pace == "best" else self.pace)

    def stranger_limits(self) -> StrangerLimits:
        """What connections may take that have not shown a valid hello."""
        return StrangerLimits(self.strangers, self.strangers_per_peer, self.hello_s, self.spare_descriptors)

    def endpoints(self) -> list[str]:
        """Where to listen: as configured, or a unix socket in the state directory."""
        return _parts(self.listen) or [f"unix://{self.state_dir}/{self.id}.sock"]

    def advertised(self, bound: list[Endpoint]) -> list[str]:
        """What clients are told: as configured, or where we listen, by the node's name where that is every address."""
        if self.advertise:
            return _parts(self.advertise)
        return [str(replace(e, host=self.node) if e.host in ANY_ADDRESS else e) for e in bound]


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def complaints(error: ValidationError) -> list[str]:
    """One line per setting that is wrong: its variable, what was given, what is asked for."""
    return [
        f"{PREFIX}{str(e['loc'][0]).upper().removeprefix(PREFIX)}={e['input']!s}: {e['msg']}" for e in error.errors()
    ]
