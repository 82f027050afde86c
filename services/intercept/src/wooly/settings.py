"""The client's settings: arguments, then WOOLYAI_* variables, then ~/.config/wooly/config (TOML), then defaults."""

from __future__ import annotations

import difflib
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

from wooly.errors import WoolyError

ENV_PREFIX = "WOOLYAI_"


class SettingsError(WoolyError, ValueError):
    """A variable or the configuration file says what cannot be; the message names it."""

    code = "wooly.settings"


def config_path() -> Path:
    """The configuration file: `$XDG_CONFIG_HOME/wooly/config`, usually ~/.config/wooly/config."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "wooly" / "config"


def _state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "wooly"


class Settings(BaseSettings):
    """What a client may configure."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    controller_url: str = Field(
        "",
        description="the controller: its REST (`https://…`), which gives credentials for NATS, or the URL of its NATS; empty: "
        "the local stack, or one for this run",
    )
    nats_creds: Path | None = Field(None, description="`.creds` file for a NATS that asks for credentials")
    tenant: str = Field("default", description="tenant to run as")
    credential: str = Field("", description="an API token of the tenant's")
    priority: int = Field(2, ge=0, le=4, description="0 (highest) to 4")
    weight: int = Field(
        1, ge=1, le=1 << 20, description="share of the device inside the class, relative to the others'"
    )
    latency_objective_ms: float = Field(
        0.0,
        ge=0,
        le=1e9,
        description="P0, P1: milliseconds within which a request is on time; refused where that cannot be kept",
    )
    service_ms: float = Field(
        0.0, ge=0, le=1e9, description="P0, P1: milliseconds of device time that one request takes"
    )
    interval_ms: float = Field(
        0.0, ge=0, le=1e9, description="P0, P1: milliseconds between two requests; what comes oftener runs as P2"
    )
    required_vram: int | None = Field(
        None, gt=0, description="bytes of memory to reserve on each device, also the session's quota there"
    )
    gpu_count: int = Field(1, ge=1, le=8, description="devices to ask for, up to 8: cuda:0, cuda:1, …")
    gpu_mode: Literal["shared", "exclusive"] = Field("shared", description="share the device or not")
    node_groups: Annotated[tuple[str, ...], NoDecode] = Field((), description="comma separated groups to run in")
    swap_from_vram: bool = Field(True, description="1: idle memory may be swapped out; 0: never")
    dedup: Literal["off", "tenant", "shared"] = Field("off", description="with whom equal weights are shared")
    jit: Literal["0", "exact", "full"] = Field(
        "exact",
        description="kernels for programs that run often. 0: none; exact: those with the library's own bits; full: all, and a "
        "program's first run waits for them",
    )
    model: str = Field("", max_length=256, description="what bills call what runs; empty: the script's name")
    channel: Literal["auto", "direct", "tunnel"] = Field(
        "auto",
        description="auto: the executor's first endpoint that answers; direct: no tunnel; tunnel: only through NATS",
    )
    tls_ca: Path | None = Field(
        None,
        description="PEM file of the authorities that may vouch for executors and NATS on tls:// and REST on https://; empty: "
        "the system's",
    )
    plaintext: bool = Field(
        False,
        description="1: an executor that offers tls:// may also be reached without TLS over a network, where tls:// does not "
        "answer; 0: never, for whoever sits on that network could cause it",
    )
    state_dir: Path = Field(default_factory=_state_dir, description="files of the local stack")
    programs_dir: Path | None = Field(
        None, description="folder to which every new program is written, for `wooly disasm`"
    )
    flush_instructions: int = Field(128, ge=1, le=4096, description="instructions after which a program is sent")
    flush_interval_ms: float = Field(
        5.0, gt=0, description="milliseconds after which an idle executor gets what there is"
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
        """Arguments, environment, file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, config_path())


def load() -> Settings:
    """The settings of this process.

    Raises:
        SettingsError: one of them is wrong.
    """
    try:
        return Settings()  # type: ignore[call-arg] # every field has a default; Field's first argument is not seen as one
    except ValidationError as e:
        raise SettingsError("; ".join([_complaint(dict(problem)) for problem in e.errors()])) from e
    except (ValueError, OSError) as e:  # of the file as a whole
        raise SettingsError(f"{config_path()}: {e}") from e


def _complaint(problem: Mapping[str, Any]) -> str:
    name = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":  # its value may be a secret
        return f"{config_path()}: there is no setting {name}{_meant(name, '')}"
    variable = ENV_PREFIX + name.upper()
    known = any(variable == key.upper() for key in os.environ)
    where = f"{variable}={problem['input']}" if known else f"{config_path()}: {name} = {problem['input']!r}"
    return f"{where}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def unknown_variables() -> list[str]:
    """Variables with our prefix that are no settings, each with the one that may have been meant."""
    names = sorted(k for k in os.environ if k.upper().startswith(ENV_PREFIX))
    strange = [k for k in names if k.upper().removeprefix(ENV_PREFIX).lower() not in Settings.model_fields]
    return [k + _meant(k.upper().removeprefix(ENV_PREFIX).lower(), ENV_PREFIX) for k in strange]


def _meant(name: str, prefix: str) -> str:
    close = difflib.get_close_matches(name, Settings.model_fields, 1)
    return f" (did you mean {prefix + close[0].upper() if prefix else close[0]}?)" if close else ""


def documentation_table() -> str:
    """The table of settings for the README, in Markdown."""
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
