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
    """Settings of a compiler. Times are in seconds, memory is in bytes.

    Attributes:
        nats_url: address of NATS.
        state_dir: folder for artifacts and code of kernels; several compilers may share it.
        workers: maximum number of programs that are compiled at the same time.
        kernel_workers: maximum number of scripts' kernels that are compiled at the same time; programs do not count.
        build_s: maximum time to compile one program.
        build_memory: maximum address space to compile one program.
        patience_s: maximum time that a request waits for its artifact; then the reply tells the client to ask again.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_COMPILER_")

    nats_url: str = "nats://127.0.0.1:4222"
    state_dir: Path = Field(default_factory=_state_dir)
    workers: int = Field(default=1, ge=1, le=64)
    kernel_workers: int = Field(default=2, ge=1, le=64)
    build_s: float = Field(default=300.0, gt=0)
    build_memory: int = Field(default=16 << 30, gt=1 << 28)
    patience_s: float = Field(default=10.0, gt=0)
