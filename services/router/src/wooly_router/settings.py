"""Settings of the router's process, from WOOLY_ROUTER_* variables."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import URL
from wooly_bus.access import NatsSettings
from wooly_bus.authority import read_issuer
from wooly_bus.channel.tls import server_context
from wooly_bus.credentials import CredentialsError, Issuer
from wooly_bus.keys import Key

from wooly_router.core.ceilings import MODEST, UNLIMITED, Ceilings, overridden
from wooly_router.core.cluster import ClusterConfig
from wooly_router.owner import Owner

#: Characters that a token which somebody chose has at least: random ones are not guessed then.
MIN_TOKEN = 32


def _state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "wooly" / "router"


class RouterSettings(BaseSettings):
    """What a router needs to know. Times in seconds.

    Attributes:
        nats_url: where NATS is.
        database_url: an SQLAlchemy URL (`sqlite+aiosqlite:///…`, `postgresql+psycopg://…`); empty: SQLite in `state_dir`.
        durable: whether a commit waits for the disk, where the database is SQLite: what was acknowledged survives a power cut. 0
            is for stacks that end with their run; a killed router loses nothing either way.
        state_dir: files of this router; only its user may read them, for they hold session tokens.
        http_host: where REST listens.
        http_port: 0 takes any free port; the one taken is written to `state_dir`/router.port.
        lease_s: how long a session lives without a word from its client.
        auth: "open": whoever reaches REST may do everything; "tokens": it asks for a tenant's API token. The first one, an
            administrator's,
            is written to `state_dir`/admin.token, unless `admin_token` is given.
        admin_token: the first administrator's token, for who wants to know it beforehand: made at the first start, while there
            is no tenant. At least 32 characters, random.
        operator_token: likewise, one with the role `operator`; empty: none is made.
        owner_token: file with a token that is always an administrator's, of the tenant `default`: that of a local stack's owner,
            whose NATS has keys that nobody else can read. With it, browsers log in by codes
            (`POST /api/v1/login/code`).
        open_to_network: where `auth` is "open" and `http_host` is not a loopback address, this must be "everyone who reaches this
            address is administrator", or the router does not start.
        channel_key: file with the seed of the key that signs what clients show at data channels (`python -m wooly_bus.authority`
            makes one); without, each router has its own, which executors take from whoever may open sessions on them.
        signing_key: file with the seed of the key that signs NATS credentials (`python -m wooly_bus.authority` makes it); with
            it, REST and opened sessions give such credentials. `WOOLY_NATS_CREDS` must be of the same account.
        credentials_s: for how long those of REST hold; clients renew them.
        session_credentials_s: for how long those of a session hold, with which it opens tunnels through NATS: as long as such a
            session can last.
        client_nats_url: where clients are told that NATS is; empty: `nats_url`.
        tls_cert: PEM file with the certificate of REST; empty: REST is not encrypted.
        tls_key: PEM file with its private key; empty: in the same file.
        blob_bytes: the largest blob that tenants may put over NATS, where they have no JetStream of their own.
        tenant_blob_bytes: bytes of blobs, results of jobs among them, beyond which a tenant may put no more; 0: no limit. No
            job is taken in then either, for its results would be blobs.
        tenant_blob_pieces: pieces of blobs beyond which a tenant may put no more; 0: no limit. A blob has one more than it has
            times 512 KiB. NATS keeps an index of them in memory, and itself refuses what goes an eighth beyond.
        tenant_sessions: sessions that one tenant may have open, or be opening, at a time.
        tenant_jobs: jobs of one tenant that may wait at a time.
        tenant_opens: sessions opened and jobs submitted a second by one tenant, on average, on one router; four times as many at
            once.
        tenant_requests: requests over NATS of one tenant that one router works on at a time, per kind of request; 32 times as
            many renewals. Further ones are refused.
        tenant_streams: event streams that one tenant may follow on one router.
        tenant_transfers: blobs that one tenant may put or read over REST at a time, on one router.
        streams: event streams of one router in all; one in eight is for operators and administrators alone.
        module_s: seconds that a job's module may take to be decoded and checked, in a process beside the router.
        module_memory: bytes of address space of that process.
        module_workers: such processes; a tenant has one of them at a time.
        module_queue: jobs of one tenant that may wait for one on one router.
        upload_idle_s: a blob's upload over NATS that no piece came for in this time is given up: its pieces are removed, and
            count no more.
        rate_limit: requests a second that one caller of REST may make on average; four times as many at once.
        traces_kept: traces that are kept at most, where any are (WOOLY_TRACES); the oldest go first.
        trace_retention_s: how long a trace is kept.
        default_class_ceiling: the highest class (0 the highest, 4 the lowest) of what a tenant runs that has no ceiling of its
            own. Without: 2 where tokens are asked for, 0 where everybody is an administrator.
        default_weight_ceiling: likewise, the largest weight; without, 100 or 2^20.
        default_exclusive: likewise, whether they may have a device to themselves; without, no or yes.
        default_vram_overcommit_percent: `CONTROLLER_DEFAULT_VRAM_OVERCOMMIT_PERCENT`; in force until the cluster's setting of
            that name is
            configured once.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_ROUTER_", populate_by_name=True, env_ignore_empty=True)

    nats_url: str = "nats://127.0.0.1:4222"
    database_url: str = ""
    durable: bool = True
    state_dir: Path = Field(default_factory=_state_dir)
    http_host: str = "127.0.0.1"
    http_port: int = Field(default=8420, ge=0, le=65535)
    lease_s: float = Field(default=15.0, gt=0)
    auth: Literal["open", "tokens"] = "open"
    admin_token: SecretStr | None = Field(default=None, min_length=MIN_TOKEN)
    operator_token: SecretStr | None = Field(default=None, min_length=MIN_TOKEN)
    owner_token: Path | None = None
    open_to_network: str = ""
    channel_key: Path | None = None
    signing_key: Path | None = None
    credentials_s: float = Field(default=3600.0, ge=1)
    session_credentials_s: float = Field(default=7 * 86400.0, ge=60)
    client_nats_url: str = ""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    blob_bytes: int = Field(default=16 << 30, ge=1)
    tenant_blob_bytes: int = Field(default=64 << 30, ge=0)
    tenant_blob_pieces: int = Field(default=1_000_000, ge=0)
    tenant_sessions: int = Field(default=256, ge=1)
    tenant_jobs: int = Field(default=2000, ge=1)
    tenant_opens: float = Field(default=50.0, gt=0)
    tenant_requests: int = Field(default=32, ge=1, le=64)
    tenant_streams: int = Field(default=16, ge=1)
    tenant_transfers: int = Field(default=4, ge=1)
    streams: int = Field(default=256, ge=2)
    module_s: float = Field(default=20.0, gt=0)
    module_memory: int = Field(default=2 << 30, ge=1 << 28)
    module_workers: int = Field(default=2, ge=1, le=64)
    module_queue: int = Field(default=16, ge=1)
    upload_idle_s: float = Field(default=3600.0, ge=300)
    rate_limit: float = Field(default=100.0, gt=0)
    traces_kept: int = Field(default=1000, ge=0, le=1_000_000)
    trace_retention_s: float = Field(default=7 * 24 * 3600.0, ge=0)
    default_class_ceiling: Annotated[int, Field(ge=0, le=4)] | None = None
    default_weight_ceiling: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    default_exclusive: bool | None = None
    default_vram_overcommit_percent: int = Field(
        default=0, ge=0, le=1000, validation_alias="CONTROLLER_DEFAULT_VRAM_OVERCOMMIT_PERCENT"
    )

    def channel_signer(self) -> Key:
        """What signs the tokens of data channels.

        Raises:
            KeyFormatError: the file has no such key.
            OSError: it cannot be read.
        """
        return Key.new("cluster") if self.channel_key is None else Key.read(self.channel_key.read_text(), "cluster")

    def owner(self, clock: Callable[[], float]) -> Owner | None:
        """Whose router this is, if it is one person's.

        Raises:
            OSError: the file cannot be read, or has no token of at least 32 characters.
        """
        if self.owner_token is None:
            return None
        token = self.owner_token.read_text().strip()
        if len(token) < MIN_TOKEN:
            raise OSError(
                f"{self.owner_token} has no token of at least {MIN_TOKEN} characters: write a random one to it"
            )
        return Owner(token, clock)

    def tls(self) -> ssl.SSLContext | None:
        """What REST shows; None: it is not encrypted.

        Raises:
            ChannelTlsError: certificate and key cannot be used.
        """
        return None if self.tls_cert is None else server_context(self.tls_cert, self.tls_key)

    def issuer(self) -> Issuer | None:
        """What makes NATS credentials, if anything does.

        Raises:
            BusError: there is no such key, or the router has no credentials itself.
            OSError: the key's file cannot be read.
        """
        if self.signing_key is None:
            return None
        creds = NatsSettings().creds
        if creds is None:
            raise CredentialsError("WOOLY_ROUTER_SIGNING_KEY is set, but the router has no WOOLY_NATS_CREDS itself")
        return read_issuer(self.signing_key, creds)

    def ceilings(self) -> Ceilings:
        """The ceilings of a tenant that has none of its own."""
        usual = MODEST if self.auth == "tokens" else UNLIMITED
        return overridden(usual, self.default_class_ceiling, self.default_weight_ceiling, self.default_exclusive)

    def cluster(self) -> ClusterConfig:
        """What the cluster's settings are until somebody changes them."""
        return ClusterConfig(default_vram_overcommit_percent=self.default_vram_overcommit_percent)

    def database(self) -> str:
        """The database's URL; SQLite in the state directory unless configured."""
        if self.database_url:
            return self.database_url
        path = str(self.state_dir / "router.sqlite")
        return URL.create("sqlite+aiosqlite", database=path).render_as_string(hide_password=False)
