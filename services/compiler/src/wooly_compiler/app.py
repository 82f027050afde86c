"""Wires the compiler's process together: settings, NATS and workers."""

from __future__ import annotations

import logging

from pydantic import ValidationError
from wooly_bus.app import ServiceApp, until_signalled
from wooly_bus.errors import BusError
from wooly_bus.private import keep_private
from wooly_bus.supervision import run, run_for_ever, supervised
from wooly_bus.tracing import setup_tracing

from wooly_compiler.actor import CompilerActor
from wooly_compiler.errors import CompilerError
from wooly_compiler.settings import CompilerSettings
from wooly_compiler.version import version

log = logging.getLogger("wooly.compiler")


async def serve(settings: CompilerSettings) -> None:
    """Serve requests until a signal arrives.

    Raises:
        BusConnectError: NATS does not answer.
        CompilerError: the worker process does not answer.
    """
    app = ServiceApp("compiler", settings.nats_url)
    actor = CompilerActor(settings, app)
    try:
        families = await actor.families()
        actor.serve(families)
        absent = await actor.missing()
        async with app.running():
            log.info(
                "compiler %s builds for %s",
                version(),
                ", ".join(families) or "no target, because no driver is installed",
            )
            for toolchain, why in absent.items():
                log.info("compiler %s does not build for %s: %s", version(), toolchain, why)
            await run_for_ever({}, until_signalled)
    finally:
        await actor.stop()


@supervised("compiler", (BusError, CompilerError, ValidationError, OSError))
def main() -> int:
    """Run the compiler until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = CompilerSettings()
    setup_tracing("compiler")
    keep_private(settings.state_dir)
    run(serve(settings))
    return 0
