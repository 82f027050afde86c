"""The client's settings, by descending precedence: arguments, WOOLYAI_* variables, ~/.config/wooly/config (TOML), defaults."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from wooly_bus.other_names import CLIENT, EXECUTOR, translated

from wooly.errors import WoolyError
from wooly.program_limits import MOST

log = logging.getLogger("wooly")
#: Prefix of the environment variables that are settings.
ENV_PREFIX = "WOOLYAI_"


class SettingsError(WoolyError, ValueError):
    """A variable or the configuration file contains an invalid setting. The message names the setting."""

    code = "wooly.settings"


def config_path() -> Path:
    """The configuration file: `$XDG_CONFIG_HOME/wooly/config`, usually ~/.config/wooly/config."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "wooly" / "config"


def _state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "wooly"


class Settings(BaseSettings):
    """All settings of the client."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    controller_url: str = Field(
        "",
        description="URL of the controller: of its REST (`https://…`), which issues credentials for NATS, or of its NATS; empty: "
        "the local stack, or a stack that is started for this run",
    )
    executor_url: str = Field(
        "",
        description="URL of one executor without a controller, as `wooly serve` prints it: `tcp://TOKEN@host:7400`; empty: a "
        "controller finds an executor",
    )
    nats_creds: Path | None = Field(None, description="`.creds` file with credentials, if NATS requires them")
    tenant: str = Field("default", description="tenant to run as")
    credential: str = Field("", description="API token of the tenant")
    priority: int = Field(2, ge=0, le=4, description="priority class, 0 (highest) to 4")
    weight: int = Field(
        1,
        ge=1,
        le=1 << 20,
        description="share of the device, relative to the weights of other sessions of the same class",
    )
    latency_objective_ms: float = Field(
        0.0,
        ge=0,
        le=1e9,
        description="P0, P1: latency objective of one request, in milliseconds; the session is refused if the device cannot "
        "meet it",
    )
    service_ms: float = Field(
        0.0, ge=0, le=1e9, description="P0, P1: milliseconds of device time that one request takes"
    )
    interval_ms: float = Field(
        0.0,
        ge=0,
        le=1e9,
        description="P0, P1: milliseconds between two requests; requests at shorter intervals run as P2",
    )
    required_vram: int | None = Field(
        None, gt=0, description="bytes of memory to reserve on each device; also the session's quota on each device"
    )
    gpu_count: int = Field(1, ge=1, le=8, description="number of devices, up to 8: cuda:0, cuda:1, …")
    gpu_mode: Literal["shared", "exclusive"] = Field(
        "shared", description="whether other sessions may use the device, too"
    )
    node_groups: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="groups of nodes to run in, comma separated"
    )
    node: str = Field(
        "",
        max_length=255,
        description="node whose devices the session uses, or one executor; empty: any. The Kubernetes operator sets it for pods "
        "that run beside their GPU",
    )
    queue_s: float = Field(
        3600.0,
        ge=0,
        le=30 * 86400,
        description="seconds to wait in the queue if no device has room, by class and then in order of arrival, and for the "
        "controller's database if it is away, and at most 30 s for a controller that no longer answers; 0: end with an error at "
        "once",
    )
    collectives: Literal["executor", "clients"] = Field(
        "executor",
        description="who carries collectives of torch.distributed. executor: the ranks' executors; clients: the ranks' "
        "processes, which is slow, for executors that cannot reach each other",
    )
    recovery: Literal["off", "auto", "on"] = Field(
        "auto",
        description="whether the session goes on in another executor if its own is lost. auto: if its buffers have at most "
        "2 GiB; on: always; off: it ends with an error. If it is not set, the cluster's setting holds, which is auto by default; "
        "at an executor of `wooly serve` it is then off",
    )
    checkpoint_s: float = Field(
        10.0,
        ge=0,
        le=86400,
        description="minimum seconds between two checkpoints of the session; 0: take one after each program, whatever it costs",
    )
    swap_from_vram: bool = Field(
        True, description="1: the executor may swap out the session's idle memory; 0: it must not"
    )
    dedup: Literal["off", "tenant", "shared"] = Field(
        "tenant",
        description="sessions with which this session shares equal weights. off: none; tenant: sessions of the same tenant; "
        "shared: also sessions of other tenants, if they have this setting, too",
    )
    jit: Literal["0", "exact", "full"] = Field(
        "exact",
        description="generated kernels for programs that run often. 0: none; exact: only kernels whose results equal the "
        "library's bit for bit; full: all kernels, and the first run of a program waits for them",
    )
    model: str = Field("", max_length=256, description="name of the workload in bills; empty: the script's name")
    cuda_version: str = Field(
        "13.0",
        max_length=16,
        description="the version that `torch.version.cuda` reports, because programs take a PyTorch without one for a CPU build; "
        "empty: that of the local PyTorch",
    )
    channel: Literal["auto", "direct", "tunnel"] = Field(
        "auto",
        description="auto: the executor's first endpoint that answers; direct: no tunnel; tunnel: only through NATS",
    )
    tls_ca: Path | None = Field(
        None,
        description="PEM file of the certificate authorities to trust, for executors and NATS on tls:// and REST on https://; "
        "empty: those of the system",
    )
    plaintext: bool = Field(
        False,
        description="1: if an executor offers tls:// and that endpoint does not answer, connect over the network without TLS; "
        "0: never, because an attacker on the network could block tls://",
    )
    capture: str = Field(
        "",
        description="only as a variable, which `wooly run`, `wooly shell` and `wooly env` set. 1: Python processes that are "
        "started with it redirect “cuda”; a path: their sessions also append a line of JSON to this file when they end",
    )
    state_dir: Path = Field(default_factory=_state_dir, description="files of the local stack")
    programs_dir: Path | None = Field(
        None, description="folder to which the client writes each new program, for `wooly disasm`"
    )
    native: Literal["auto", "on", "off"] = Field(
        "auto",
        description="native kernels of the client, from the package `wooly-native`, which change no program. auto: if the "
        "package is installed for this PyTorch; on: required, otherwise the session is not opened; off: none, Python records "
        "everything",
    )
    flush_instructions: int = Field(
        MOST,
        ge=1,
        le=4096,
        description="maximum number of instructions before the client sends a program; programs are shorter after a wait, and "
        "until a loop has sent the same ones often",
    )
    flush_interval_ms: float = Field(
        5.0, gt=0, description="milliseconds after which the client sends an open program to an idle executor"
    )
    busy_wait_us: int = Field(
        200,
        ge=0,
        le=10_000,
        description="microseconds for which a wait looks for the executor's answer before it blocks, if the last wait was "
        "shorter and no other thread wants the core; 0, or with one core: it blocks at once",
    )

    @field_validator("node_groups", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple([part.strip() for part in value.split(",") if part.strip()])
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order of precedence: arguments, environment, file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, config_path())


def load() -> Settings:
    """Load the settings of this process.

    Raises:
        SettingsError: a setting is invalid.
    """
    try:
        others, warnings = translated(os.environ, CLIENT)
    except ValueError as e:
        raise SettingsError(str(e)) from e
    for text in warnings:
        log.warning("%s", text)
    try:
        found: dict[str, Any] = {name.removeprefix(ENV_PREFIX).lower(): value for name, value in others.items()}
        return Settings(**found)
    except ValidationError as e:
        raise SettingsError("; ".join([_complaint(dict(problem)) for problem in e.errors()])) from e
    except (ValueError, OSError) as e:  # the file cannot be read, or is not TOML
        raise SettingsError(f"cannot read the configuration file {config_path()}: {e}") from e


def _complaint(problem: Mapping[str, Any]) -> str:
    name = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":  # the message omits the value, which may be a secret
        return f"{config_path()}: unknown setting {name}{_meant(name, '')}"
    variable = ENV_PREFIX + name.upper()
    known = any(variable == key.upper() for key in os.environ)
    where = f"{variable}={problem['input']}" if known else f"{config_path()}: {name} = {problem['input']!r}"
    return f"{where}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def unknown_variables() -> list[str]:
    """Environment variables that start with WOOLYAI_ but are not settings, each with the closest setting if one is similar."""
    names = sorted(k for k in os.environ if k.upper().startswith(ENV_PREFIX))
    others = {name.theirs for name in (*CLIENT, *EXECUTOR)}
    strange = [k for k in names if k.upper().removeprefix(ENV_PREFIX).lower() not in Settings.model_fields]
    strange = [k for k in strange if k not in others]
    return [k + _meant(k.upper().removeprefix(ENV_PREFIX).lower(), ENV_PREFIX) for k in strange]


def _meant(name: str, prefix: str) -> str:
    close = difflib.get_close_matches(name, Settings.model_fields, 1)
    return f" (did you mean {prefix + close[0].upper() if prefix else close[0]}?)" if close else ""


def documentation_table() -> str:
    """The table of settings for docs/getting-started/settings.md, in Markdown."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        if field.default_factory is not None:
            default = "`~/.local/state/wooly`"
        elif field.default in (None, "", ()):
            default = ""
        else:
            value = field.default
            default = f"`{int(value) if isinstance(value, bool) else value}`"
        rows.append(f"| `{ENV_PREFIX}{name.upper()}` | {default} | {field.description} |")
    return "\n".join(rows)
