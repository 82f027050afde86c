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

from wooly_router.core.ceilings import RESTRICTED, UNLIMITED, Ceilings, overridden
from wooly_router.core.cluster import ClusterConfig
from wooly_router.core.registry import LOST_AFTER_S
from wooly_router.owner import Owner

#: Minimum length, in characters, of a token that a person chose: a random token of this length cannot be guessed.
MIN_TOKEN = 32


def _state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "wooly" / "router"


class RouterSettings(BaseSettings):
    """The settings of a router. Times in seconds.

    Attributes:
        nats_url: address of NATS.
        database_url: an SQLAlchemy URL (`sqlite+aiosqlite:///…`, `postgresql+psycopg://…`); empty: SQLite in `state_dir`.
        durable: whether an SQLite commit waits for the disk, so that acknowledged data survives a power cut. 0 is for stacks
            that end with their run. A killed router loses nothing in either case.
        state_dir: files of this router. Only its user may read them, because they contain session tokens.
        rest: whether the router has REST and pages. 0 is for stacks that end with their run: files tell that the router is up
            (`state_dir`/router.port, empty) and knows an executor (`state_dir`/router.ready).
        http_host: address on which REST listens.
        http_port: port of REST; 0 takes any free port. The router writes its port to `state_dir`/router.port.
        lease_s: how long a session lives without a renewal from its client.
        lost_after_s: seconds without a heartbeat after which the sessions of an executor count as lost. A stack of `wooly up`
            waits for 15: an executor whose process ends is started again at once, and one that is slow has no better place.
        auth: "open": every client that reaches REST may do everything; "tokens": REST requires a tenant's API token. The first
            token, an administrator's, is written to `state_dir`/admin.token, unless `admin_token` is given.
        admin_token: the first administrator's token, if it must be known beforehand. It is made at the first start, while no
            tenant exists. At least 32 characters, random.
        operator_token: a first token with the role `operator`, made in the same way; empty: none is made.
        owner_token: file with a token that is always an administrator's, of the tenant `default`: the token of a local stack's
            owner, whose NATS has keys that nobody else can read. With it, browsers log in by codes (`POST /api/v1/login/code`).
        open_to_network: if `auth` is "open" and `http_host` is not a loopback address, this must be "everyone who reaches this
            address is administrator"; otherwise the router does not start.
        channel_key: file with the seed of the key that signs the tokens of data channels (`python -m wooly_bus.authority` makes
            one); empty: each router makes its own key, and executors accept it from any client that may open sessions on them.
        signing_key: file with the seed of the key that signs NATS credentials (`python -m wooly_bus.authority` makes it); with
            it, REST and opened sessions issue such credentials. `WOOLY_NATS_CREDS` must belong to the same account.
        credentials_s: lifetime of NATS credentials from REST; clients renew them.
        session_credentials_s: lifetime of a session's NATS credentials, with which it opens tunnels through NATS: the longest
            time that such a session can last.
        client_nats_url: address of NATS that clients are told; empty: `nats_url`.
        tls_cert: PEM file with the certificate of REST; empty: REST is not encrypted.
        tls_key: PEM file with the certificate's private key; empty: the key is in `tls_cert`.
        blob_bytes: size limit, in bytes, of a blob that a tenant without its own JetStream puts over NATS.
        tenant_blob_bytes: quota, in bytes, of a tenant's blobs, including results of jobs; 0: no limit. A tenant above it can
            put no blob, and submit no job, because results are blobs.
        tenant_blob_pieces: quota of a tenant's blob pieces; 0: no limit. A blob has one piece per 512 KiB, and one more. NATS
            keeps an index of the pieces in memory; it refuses pieces beyond the quota plus an eighth.
        tenant_sessions: maximum number of sessions of one tenant that are open or opening at a time.
        tenant_jobs: maximum number of waiting jobs of one tenant.
        tenant_opens: opened sessions and submitted jobs per second of one tenant, on average, on one router; four times as many
            in a burst.
        tenant_requests: maximum number of concurrent NATS requests of one tenant on one router, per kind of request; 32 times
            as many renewals. More are refused.
        tenant_streams: maximum number of event streams of one tenant on one router.
        tenant_transfers: maximum number of concurrent blob transfers of one tenant over REST, on one router.
        streams: maximum number of event streams on one router; one eighth is reserved for operators and administrators.
        module_s: time limit for decoding and checking a job's module, in a separate process.
        module_memory: limit of that process's address space, in bytes.
        module_workers: number of such processes; a tenant uses one of them at a time.
        module_queue: maximum number of jobs of one tenant that wait for such a process on one router.
        upload_idle_s: time without a new piece after which an upload over NATS counts as abandoned. Its pieces are removed and
            no longer count.
        rate_limit: REST requests per second of one caller, on average; four times as many in a burst.
        traces_kept: maximum number of kept traces, if the router keeps traces (WOOLY_TRACES); the oldest are removed first.
        trace_retention_s: how long a trace is kept.
        default_class_ceiling: class ceiling of a tenant without its own (0 is the highest class, 4 the lowest). Default: 2 if
            tokens are required, 0 if every caller is an administrator.
        default_weight_ceiling: weight ceiling of a tenant without its own. Default: 100 if tokens are required, otherwise 2^20.
        default_exclusive: whether a tenant without its own setting may use a device exclusively. Default: no if tokens are
            required, otherwise yes.
        default_vram_overcommit_percent: `CONTROLLER_DEFAULT_VRAM_OVERCOMMIT_PERCENT`; in force until the cluster's setting of
            that name is changed for the first time.
        default_vram_claim: `CONTROLLER_DEFAULT_VRAM_CLAIM`, in bytes; likewise.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_ROUTER_", populate_by_name=True, env_ignore_empty=True)

    nats_url: str = "nats://127.0.0.1:4222"
    database_url: str = ""
    durable: bool = True
    state_dir: Path = Field(default_factory=_state_dir)
    rest: bool = True
    http_host: str = "127.0.0.1"
    http_port: int = Field(default=8420, ge=0, le=65535)
    lease_s: float = Field(default=15.0, gt=0)
    lost_after_s: float = Field(default=LOST_AFTER_S, ge=LOST_AFTER_S)
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
    default_vram_claim: int = Field(default=0, ge=0, lt=1 << 63, validation_alias="CONTROLLER_DEFAULT_VRAM_CLAIM")

    def channel_signer(self) -> Key:
        """Return the key that signs the tokens of data channels.

        Raises:
            KeyFormatError: the file contains no such key.
            OSError: the file cannot be read.
        """
        return Key.new("cluster") if self.channel_key is None else Key.read(self.channel_key.read_text(), "cluster")

    def owner(self, clock: Callable[[], float]) -> Owner | None:
        """Return the owner of this router; None if it belongs to no single person.

        Raises:
            OSError: the file cannot be read, or its token has fewer than 32 characters.
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
        """Return the TLS context of REST; None: REST is not encrypted.

        Raises:
            ChannelTlsError: certificate or key cannot be used.
        """
        return None if self.tls_cert is None else server_context(self.tls_cert, self.tls_key)

    def issuer(self) -> Issuer | None:
        """Return the issuer of NATS credentials; None if no signing key is configured.

        Raises:
            BusError: the file contains no such key, or the router has no NATS credentials itself.
            OSError: the key file cannot be read.
        """
        if self.signing_key is None:
            return None
        creds = NatsSettings().creds
        if creds is None:
            raise CredentialsError(
                "WOOLY_ROUTER_SIGNING_KEY is set, but WOOLY_NATS_CREDS is not, and the router needs both: set WOOLY_NATS_CREDS"
            )
        return read_issuer(self.signing_key, creds)

    def ceilings(self) -> Ceilings:
        """Return the ceilings of a tenant without own values."""
        usual = RESTRICTED if self.auth == "tokens" else UNLIMITED
        return overridden(usual, self.default_class_ceiling, self.default_weight_ceiling, self.default_exclusive)

    def cluster(self) -> ClusterConfig:
        """Return the cluster's settings as they are until an operator changes them."""
        return ClusterConfig(
            default_vram_overcommit_percent=self.default_vram_overcommit_percent,
            default_vram_claim=self.default_vram_claim,
        )

    def database(self) -> str:
        """Return the database's URL; SQLite in the state directory, unless configured."""
        if self.database_url:
            return self.database_url
        path = str(self.state_dir / "router.sqlite")
        return URL.create("sqlite+aiosqlite", database=path).render_as_string(hide_password=False)
