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
    """The settings of metering. Times are in seconds.

    Attributes:
        nats_url: URL of NATS.
        database_url: SQLAlchemy URL of the ledger; empty: SQLite in `state_dir`.
        durable: whether a commit waits for the disk if the ledger is SQLite, so that booked usage survives a power failure. Set
            it to 0
            only for stacks that end with their run.
        state_dir: folder for files.
        http_host: address on which REST and `/metrics` listen.
        http_port: port of REST and `/metrics`. 0: any free port; empty: neither is served. The port is written to
            `state_dir`/metering.port.
        metrics_token: file with the bearer token that `/metrics` and `/healthz` require; empty: they require no token.
        open_to_network: if the router requires no tokens and `http_host` is not a loopback address, REST refuses all requests,
            unless
            this is "everyone who reaches this address is administrator".
        tls_cert: PEM file with the certificate of REST and `/metrics`; empty: they are not encrypted.
        tls_key: PEM file with the private key; empty: the key is in the file of the certificate.
        batch_events: maximum number of messages that one transaction books.
        budgets_s: time between two checks of all budgets. Booking checks budgets, too; this check notices a new day or month, or
            an
            executor that is reachable again.
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
        """The TLS context of REST; None: REST is not encrypted.

        Raises:
            ChannelTlsError: the certificate or the key cannot be used.
        """
        return None if self.tls_cert is None else server_context(self.tls_cert, self.tls_key)

    @property
    def ledger_url(self) -> str:
        """SQLAlchemy URL of the ledger."""
        return self.database_url or f"sqlite:///{self.state_dir}/credits.db"
