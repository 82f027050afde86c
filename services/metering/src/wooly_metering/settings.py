"""Settings of the metering process, from WOOLY_METERING_* variables."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from wooly_bus.channel import server_context


def _state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "wooly" / "metering"


class MeteringSettings(BaseSettings):
    """What metering needs to know. Times in seconds.

    Attributes:
        nats_url: where NATS is.
        database_url: SQLAlchemy's URL of the ledger; empty: SQLite in `state_dir`.
        durable: whether a commit waits for the disk, where the ledger is SQLite: what was booked survives a power cut. 0 is for
            stacks that end with their run.
        state_dir: where files are.
        http_host: where REST and `/metrics` listen.
        http_port: 0 takes any free port; empty: neither. The one taken is written to `state_dir`/metering.port.
        metrics_token: file with what a scraper of `/metrics` and `/healthz` must show as its bearer token; empty: they ask for
            nothing.
        open_to_network: where the router asks nobody for a token and `http_host` is not a loopback address, this must be
            "everyone who reaches this address is administrator", or REST refuses everybody.
        tls_cert: PEM file with the certificate of REST and `/metrics`; empty: they are not encrypted.
        tls_key: PEM file with its private key; empty: in the same file.
        batch_events: messages booked in one transaction at most.
        budgets_s: how often budgets are looked at beside what is booked: a day or month may begin, an executor come back.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_METERING_")

    nats_url: str = "nats://127.0.0.1:4222"
    database_url: str = ""
    durable: bool = True
    state_dir: Path = Field(default_factory=_state_dir)
    http_host: str = "127.0.0.1"
    http_port: int | None = Field(default=9430, ge=0, le=65535)
    metrics_token: Path | None = None
    open_to_network: str = ""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    batch_events: int = Field(default=500, ge=1)
    budgets_s: float = Field(default=5.0, gt=0)

    @field_validator("http_port", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        return None if value == "" else value

    def tls(self) -> ssl.SSLContext | None:
        """What REST shows; None: it is not encrypted.

        Raises:
            ChannelTlsError: certificate and key cannot be used.
        """
        return None if self.tls_cert is None else server_context(self.tls_cert, self.tls_key)

    @property
    def ledger_url(self) -> str:
        """Where the ledger is."""
        return self.database_url or f"sqlite:///{self.state_dir}/credits.db"
