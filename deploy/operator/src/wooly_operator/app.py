"""Connects the parts of the operator's process: settings, credentials, kopf, the reconciler."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
import kopf
from pydantic import ValidationError

from wooly_operator.controller import Controller
from wooly_operator.handlers import register
from wooly_operator.kubernetes import Kubernetes
from wooly_operator.reconciler import Reconciler
from wooly_operator.settings import OperatorSettings
from wooly_operator.tracing import setup as setup_tracing

log = logging.getLogger("wooly.operator")
Login = Callable[[], kopf.ConnectionInfo]


def login() -> kopf.ConnectionInfo:
    """Credentials for the API server, from the pod's service account or a kubeconfig.

    Raises:
        kopf.LoginError: there is neither a service account nor a kubeconfig.
    """
    settings = kopf.OperatorSettings()
    found = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)
    if found is None:
        raise kopf.LoginError("no credentials for the API server: found neither a service account nor a kubeconfig")
    return found


async def serve(settings: OperatorSettings, login: Login = login, stop: threading.Event | None = None) -> None:
    """Run until a signal arrives, or `stop` is set."""
    registry = kopf.OperatorRegistry()
    headers = {"Authorization": f"Bearer {settings.token}"} if settings.token else {}

    @kopf.on.login(registry=registry)
    async def connection(**_: Any) -> kopf.ConnectionInfo:
        return login()

    @kopf.on.startup(registry=registry)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure_kopf(settings)

    def configure_kopf(framework: kopf.OperatorSettings) -> None:
        framework.posting.enabled = False
        if settings.webhook_port:
            framework.admission.server = kopf.WebhookServer(
                port=settings.webhook_port,
                certfile=settings.tls_cert,
                pkeyfile=settings.tls_key,
                insecure=settings.tls_cert is None,
            )

    async with aiohttp.ClientSession(headers=headers) as session:
        kubernetes = Kubernetes(login)
        reconciler = Reconciler(kubernetes, Controller(session, settings.controller_url), settings.reconcile_s)
        register(registry, settings, reconciler)
        watching = kopf.operator(
            registry=registry,
            standalone=True,
            clusterwide=True,
            liveness_endpoint=settings.health_url or None,
            stop_flag=stop,
        )
        tasks = [asyncio.create_task(watching), asyncio.create_task(reconciler.run())]
        try:
            # Neither task works without the other: the first one to end ends the process.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await kubernetes.close()


def main() -> int:
    """Run until SIGTERM or SIGINT. Returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = OperatorSettings()
        setup_tracing()
        if settings.webhook_port and (settings.tls_cert is None or settings.tls_key is None):
            log.error(
                "cannot serve admission without TLS, which the API server requires; set WOOLY_OPERATOR_TLS_CERT and "
                "WOOLY_OPERATOR_TLS_KEY, or turn admission off (WOOLY_OPERATOR_WEBHOOK_PORT=0)"
            )
            return 2
        asyncio.run(serve(settings))
    except (ValidationError, kopf.LoginError, OSError, ImportError) as e:
        log.error("the operator ends: %s", e)
        return 1
    return 0
