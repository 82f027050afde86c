"""The command `wooly credits`."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Annotated

import typer

from wooly.cli.commands.app import Json, app, fail, out, read_settings
from wooly.cli.credits import as_csv, credits_of, print_credits, read_credits
from wooly.control import ControlError, connect
from wooly.errors import WoolyError

credits = typer.Typer(name="credits", help="Show spent credits, and set budgets.", invoke_without_command=True)
app.add_typer(credits)


@credits.callback()
def show_credits(
    context: typer.Context,
    by: Annotated[str, typer.Option(help="Sum by run, model or hour.")] = "run",
    tenant: Annotated[str, typer.Option(help="Show only this tenant.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="Maximum number of rows.")] = 20,
    as_json: Json = False,
    as_table: Annotated[bool, typer.Option("--csv", help="Print rows as CSV, with integers.")] = False,
) -> None:
    """Show the balance, and spent credits by run, model or hour. Amounts in JSON and CSV are micro-credits."""
    if context.invoked_subcommand is not None:
        return
    from wooly_wis.credits import CreditsRequest

    if by not in ("run", "model", "hour"):
        raise fail(ControlError(f"--by {by} is not valid; use run, model or hour"))
    try:
        with closing(connect(read_settings())) as controller:
            reply = read_credits(controller, CreditsRequest(by=by, tenant=tenant), limit)  # type: ignore[arg-type]
    except WoolyError as e:
        raise fail(e) from e
    if as_json:
        print(json.dumps(reply.model_dump(mode="json")))
    elif as_table:
        print(as_csv(reply.rows), end="")
    else:
        print_credits(out, reply, by)


@credits.command()
def budget(
    tenant: Annotated[str, typer.Argument(metavar="TENANT")],
    soft: Annotated[float | None, typer.Option(min=0, help="Spent credits at which an event is sent.")] = None,
    hard: Annotated[
        float | None, typer.Option(min=0, help="Spent credits at which the tenant's sessions are suspended.")
    ] = None,
    period: Annotated[str, typer.Option(help="Period of the limits: total, month or day (UTC).")] = "total",
    as_json: Json = False,
) -> None:
    """Set a tenant's budget. A limit that is not given is removed. Suspended sessions continue if the new limits permit it."""
    from pydantic import ValidationError
    from wooly_bus import contracts
    from wooly_wis.credits import SetBudgetRequest

    amounts = {name: None if n is None else round(n * 1e6) for name, n in (("soft_ucr", soft), ("hard_ucr", hard))}
    try:
        request = SetBudgetRequest.model_validate({"tenant": tenant, "period": period} | amounts)
    except ValidationError as e:
        raise fail(ControlError(f"the budget is not valid: {e.errors()[0]['msg']}")) from e
    try:
        with closing(connect(read_settings())) as controller:
            state = controller.ask(contracts.METERING_BUDGET_SET, request, timeout=10.0)
    except WoolyError as e:
        raise fail(e) from e
    if as_json:
        print(json.dumps(state.model_dump(mode="json")))
    else:
        suspended = "; its sessions are suspended" if state.held else ""
        out.print(f"tenant {tenant}: {credits_of(state.spent_ucr)} credits spent{suspended}", highlight=False)
