"""Settings of the operator's process, from WOOLY_OPERATOR_* variables."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from wooly_operator.core.pods import Placement


class OperatorSettings(BaseSettings):
    """Settings of the operator. Times are in seconds.

    Attributes:
        controller_url: URL of the router's REST.
        token: bearer token for the router's REST; empty: send no token.
        client_url: value of `WOOLYAI_CONTROLLER_URL` for pods that do not set this variable; empty: do not set it.
        placement: of pods without the annotation `woolyai.com/beside-gpu`. `prefer`: they prefer nodes where they fit, and run
            anywhere else; `require`: they run only there, and their sessions use that node; `off`: no placement.
        reconcile_s: longest time between two reconciliations. A change in Kubernetes triggers one earlier.
        webhook_port: port of the admission webhook for the API server; 0: admission is off.
        tls_cert: PEM file with the certificate of the webhook, which the webhook configurations trust.
        tls_key: PEM file with the private key of the certificate.
        health_url: URL on which the operator serves `/healthz`; empty: do not serve it.
    """

    model_config = SettingsConfigDict(env_prefix="WOOLY_OPERATOR_")

    controller_url: str = "http://127.0.0.1:8420"
    token: str = ""
    client_url: str = ""
    placement: Placement = "prefer"
    reconcile_s: float = Field(default=5.0, gt=0)
    webhook_port: int = Field(default=9443, ge=0, le=65535)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    health_url: str = "http://0.0.0.0:8080/healthz"
