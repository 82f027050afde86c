"""Settings of the executor's process, from WOOLY_EXECUTOR_* variables."""

from __future__ import annotations

import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from wooly_bus.channel import Endpoint
from wooly_wis.messages import Id

PREFIX = "WOOLY_EXECUTOR_"
ANY_ADDRESS = ("0.0.0.0", "::")


class ExecutorSettings(BaseSettings):
    """What an executor needs to know. Memory in bytes, times in seconds."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    nats_url: str = "nats://127.0.0.1:4222"
    id: Id = Field(default_factory=lambda: f"{socket.gethostname().split('.')[0]}-0")
    node: str = Field(default_factory=socket.gethostname)
    runtime: Literal["auto", "opencl", "torch_cpu", "reference"] = "auto"
    listen: str = ""
    advertise: str = ""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    state_dir: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()) / "wooly-executor")
    memory: Annotated[int, Field(gt=0, lt=1 << 63)] | None = None
    dispatch: Literal["fair", "fifo"] = "fair"
    heartbeat_s: float = Field(default=1.0, gt=0)
    compiler_timeout_s: float = Field(default=20.0, gt=0)

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
        f"{PREFIX}{'_'.join(str(part) for part in e['loc'][:1]).upper()}={e['input']!s}: {e['msg']}"
        for e in error.errors()
    ]
