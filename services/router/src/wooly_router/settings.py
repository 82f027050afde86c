"""Settings of the router's process, from WOOLY_ROUTER_* variables."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class RouterSettings(BaseSettings):
    """What a router needs to know. Times in seconds.

    Attributes:
        http_port: 0 takes any free port; the one taken is written to `state_dir`/router.port.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_ROUTER_")

    nats_url: str = "nats://127.0.0.1:4222"
    database_url: str = ""
    state_dir: Path = Field(default_factory=lambda: Path(tempfile.gettempdir()) / "wooly-router")
    http_host: str = "127.0.0.1"
    http_port: int = 8420
    lease_s: float = 15.0

    def database(self) -> str:
        """The database's URL; SQLite in the state directory unless configured."""
        return self.database_url or f"sqlite+aiosqlite:///{self.state_dir}/router.sqlite"
