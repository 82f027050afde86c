"""Settings of the executor's process, from WOOLY_EXECUTOR_* variables."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ExecutorSettings(BaseSettings):
    """What an executor needs to know. Memory in bytes, times in seconds."""

    model_config = SettingsConfigDict(env_prefix="WOOLY_EXECUTOR_")

    nats_url: str = "nats://127.0.0.1:4222"
    id: str = Field(default_factory=lambda: f"{socket.gethostname().split('.')[0]}-0")
    node: str = Field(default_factory=socket.gethostname)
    runtime: Literal["cpu", "reference"] = "cpu"
    listen: str = ""
    state_dir: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()) / "wooly-executor")
    memory: int | None = None
    heartbeat_s: float = 1.0

    def endpoints(self) -> list[str]:
        """Where to listen: as configured, or a unix socket in the state directory."""
        if self.listen:
            return [part.strip() for part in self.listen.split(",") if part.strip()]
        return [f"unix://{self.state_dir}/{self.id}.sock"]
