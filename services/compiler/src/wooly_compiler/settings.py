"""Settings of the compiler's process. They are read from the WOOLY_COMPILER_* environment variables."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


def _state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "wooly" / "compiler"


class CompilerSettings(BaseSettings):
    """What a compiler needs to know. Times in seconds, memory in bytes.

    Attributes:
        nats_url: where NATS is.
        state_dir: where artifacts and code are kept; several compilers may share it.
        workers: programs that are compiled at the same time.
        kernel_workers: kernels of scripts that are compiled at the same time, beside programs.
        build_s: that compiling one may take.
        build_memory: address space that it may take.
        patience_s: how long a request waits for its artifact before it is told to ask again.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_COMPILER_")

    nats_url: str = "nats://127.0.0.1:4222"
    state_dir: Path = Field(default_factory=_state_dir)
    workers: int = Field(default=1, ge=1, le=64)
    kernel_workers: int = Field(default=2, ge=1, le=64)
    build_s: float = Field(default=300.0, gt=0)
    build_memory: int = Field(default=16 << 30, gt=1 << 28)
    patience_s: float = Field(default=10.0, gt=0)
