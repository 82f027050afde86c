"""Settings of the router's process, from WOOLY_ROUTER_* variables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import URL

from wooly_router.core.cluster import ClusterConfig


def _state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "wooly" / "router"


class RouterSettings(BaseSettings):
    """What a router needs to know. Times in seconds.

    Attributes:
        nats_url: where NATS is.
        database_url: an SQLAlchemy URL (`sqlite+aiosqlite:///…`, `postgresql+psycopg://…`); empty: SQLite in `state_dir`.
        state_dir: files of this router; only its user may read them, for they hold session tokens.
        http_host: where REST listens.
        http_port: 0 takes any free port; the one taken is written to `state_dir`/router.port.
        lease_s: how long a session lives without a word from its client.
        auth: "open": whoever reaches REST may do everything; "tokens": it asks for a tenant's API token. The first one, an
            administrator's,
            is written to `state_dir`/admin.token.
        rate_limit: requests a second that one caller of REST may make on average; four times as many at once.
        traces_kept: traces that are kept at most, where any are (WOOLY_TRACES); the oldest go first.
        trace_retention_s: how long a trace is kept.
        default_vram_overcommit_percent: `CONTROLLER_DEFAULT_VRAM_OVERCOMMIT_PERCENT`; in force until the cluster's setting of
            that name is
            configured once.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_ROUTER_", populate_by_name=True)

    nats_url: str = "nats://127.0.0.1:4222"
    database_url: str = ""
    state_dir: Path = Field(default_factory=_state_dir)
    http_host: str = "127.0.0.1"
    http_port: int = Field(default=8420, ge=0, le=65535)
    lease_s: float = Field(default=15.0, gt=0)
    auth: Literal["open", "tokens"] = "open"
    rate_limit: float = Field(default=100.0, gt=0)
    traces_kept: int = Field(default=1000, ge=0, le=1_000_000)
    trace_retention_s: float = Field(default=7 * 24 * 3600.0, ge=0)
    default_vram_overcommit_percent: int = Field(
        default=0, ge=0, le=1000, validation_alias="CONTROLLER_DEFAULT_VRAM_OVERCOMMIT_PERCENT"
    )

    def cluster(self) -> ClusterConfig:
        """What the cluster's settings are until somebody changes them."""
        return ClusterConfig(default_vram_overcommit_percent=self.default_vram_overcommit_percent)

    def database(self) -> str:
        """The database's URL; SQLite in the state directory unless configured."""
        if self.database_url:
            return self.database_url
        path = str(self.state_dir / "router.sqlite")
        return URL.create("sqlite+aiosqlite", database=path).render_as_string(hide_password=False)
