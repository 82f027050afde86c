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
    """The settings of a scheduler. Times are in seconds.

    Attributes:
        nats_url: URL of NATS.
        metrics_host: address on which `/metrics` listens.
        metrics_port: port of `/metrics`. 0: any free port; empty: no `/metrics`. The port is written to
            `state_dir`/scheduler.port.
        metrics_token: file with the bearer token that `/metrics` requires; empty: `/metrics` requires no token.
        state_dir: folder of the port file.
        epoch_s: time between two checks of the pacing windows.
        checkpoint_s: time between two checkpoints in JetStream. A restarted scheduler replays only the entries after the
            checkpoint.
        silence_s: the scheduler forgets a GPU that sends nothing for this time.
        error_permille: by how much admission assumes that launches overrun their estimates, in permille.
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
