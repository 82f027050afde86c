"""Settings of the scheduler's process, from WOOLY_SCHEDULER_* variables."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


def _state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "wooly" / "scheduler"


class SchedulerSettings(BaseSettings):
    """What a scheduler needs to know. Times in seconds.

    Attributes:
        nats_url: where NATS is.
        metrics_host: where `/metrics` listens.
        metrics_port: 0 takes any free port; empty: no `/metrics`. The one taken is written to `state_dir`/scheduler.port.
        metrics_token: file with what a scraper must show as its bearer token; empty: `/metrics` asks for nothing.
        state_dir: where that file is.
        epoch_s: how often windows are looked at.
        checkpoint_s: how often what was folded is kept in JetStream, so that a restart need not replay all.
        silence_s: a GPU of which nothing was heard for so long is forgotten.
        error_permille: by how much launches are taken to overrun their estimates, in admission.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_SCHEDULER_")

    nats_url: str = "nats://127.0.0.1:4222"
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = Field(default=9420, ge=0, le=65535)
    metrics_token: Path | None = None
    state_dir: Path = Field(default_factory=_state_dir)
    epoch_s: float = Field(default=0.1, gt=0)
    checkpoint_s: float = Field(default=30.0, gt=0)
    silence_s: float = Field(default=60.0, gt=0)
    error_permille: int = Field(default=100, ge=0)

    @field_validator("metrics_port", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        return None if value == "" else value
