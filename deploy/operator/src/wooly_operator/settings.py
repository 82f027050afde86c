"""Settings of the operator's process, from WOOLY_OPERATOR_* variables."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from wooly_operator.core.pods import Placement


class OperatorSettings(BaseSettings):
    """What an operator needs to know. Times in seconds.

    Attributes:
        controller_url: the router's REST, as the operator reaches it.
        token: bearer token for it; empty: none is sent.
        client_url: `WOOLYAI_CONTROLLER_URL` of pods that do not set it themselves; empty: they get none.
        placement: `require`: pods only go to nodes where they fit; `prefer`: better there than elsewhere; `off`.
        reconcile_s: how often the cluster is compared with what was said, at most; changes are taken up within it.
        webhook_port: where the API server asks about pods; 0: admission is off.
        tls_cert: PEM file with the certificate for it, trusted by the webhook configurations.
        tls_key: PEM file with its private key.
        health_url: where `/healthz` is answered; empty: nowhere.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_OPERATOR_")

    controller_url: str = "http://127.0.0.1:8420"
    token: str = ""
    client_url: str = ""
    placement: Placement = "require"
    reconcile_s: float = Field(default=5.0, gt=0)
    webhook_port: int = Field(default=9443, ge=0, le=65535)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    health_url: str = "http://0.0.0.0:8080/healthz"
