"""The command `wooly tenants`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from wooly.cli.commands.app import Json, app, fail, out, read_settings
from wooly.cli.tables import Fitted, plain_table
from wooly.control import ControlError, connect
from wooly.errors import WoolyError

if TYPE_CHECKING:
    from wooly_bus.contract_types import Q, R, Rpc
    from wooly_wis.messages import TenantInfo

tenants = typer.Typer(name="tenants", help="List tenants and their permissions, or change them (for administrators).")
app.add_typer(tenants)
Name = Annotated[str, typer.Argument(metavar="NAME", help="The tenant.")]


def _ask(rpc: Rpc[Q, R], request: Q) -> R:
    """Send a request to the router with the user's API token, and return the reply.

    Raises:
        typer.Exit: the router does not answer, or refuses the request.
    """
    try:
        settings = read_settings()
        with closing(connect(settings)) as controller:
            credential = {"credential": settings.credential}
            return controller.ask(rpc, request.model_copy(update=credential), timeout=10.0)
    except WoolyError as e:
        raise fail(e) from e


def _all() -> tuple[TenantInfo, ...]:
    from wooly_bus import contracts
    from wooly_wis.messages import TenantsRequest

    return _ask(contracts.ROUTER_TENANT_LIST, TenantsRequest()).tenants


def _print(found: Sequence[TenantInfo]) -> None:
    table = plain_table()
    for column in ("tenant", "state", "class", "weight", "exclusive", "opaque kernels", "description"):
        table.add_column(column)
    for t in found:
        may = ("yes" if t.exclusive else "no", "yes" if t.opaque_kernels else "no")
        state = "disabled" if t.disabled else "active"
        table.add_row(
            t.name, state, f"up to P{t.class_ceiling}", f"up to {t.weight_ceiling}", *may, t.description or "–"
        )
    out.print(Fitted(table))


@tenants.command("list")
def list_tenants(as_json: Json = False) -> None:
    """List all tenants with their ceilings (class, weight) and permissions."""
    found = _all()
    if as_json:
        print(json.dumps({"tenants": [t.model_dump(mode="json") for t in found]}))
    else:
        _print(found)


@tenants.command()
def show(name: Name, as_json: Json = False) -> None:
    """Show one tenant and its ceilings."""
    found = [t for t in _all() if t.name == name]
    if not found:
        raise fail(ControlError(f"the tenant {name} does not exist; `wooly tenants list` shows all tenants"))
    if as_json:
        print(json.dumps(found[0].model_dump(mode="json")))
    else:
        _print(found)


@tenants.command("set")
def set_tenant(
    name: Name,
    class_ceiling: Annotated[
        int | None,
        typer.Option(min=0, max=4, help="Highest class of the tenant's sessions and jobs: 0 (highest) to 4."),
    ] = None,
    weight_ceiling: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="Largest weight of the tenant's sessions and jobs.")
    ] = None,
    exclusive: Annotated[
        bool | None,
        typer.Option("--exclusive/--no-exclusive", help="Whether sessions and jobs may have a device exclusively."),
    ] = None,
    opaque_kernels: Annotated[
        bool | None,
        typer.Option(
            "--opaque-kernels/--no-opaque-kernels",
            help="Whether sessions may launch kernels that Wooly cannot check (PTX).",
        ),
    ] = None,
    disabled: Annotated[
        bool | None, typer.Option("--disabled/--enabled", help="Whether all requests of the tenant are refused.")
    ] = None,
    description: Annotated[str | None, typer.Option(help="Description of the tenant.")] = None,
    as_json: Json = False,
) -> None:
    """Make or change a tenant. Options that are not given do not change. Running tasks above a new ceiling are lowered to it."""
    from pydantic import ValidationError
    from wooly_bus import contracts
    from wooly_wis.messages import SetTenantRequest

    changes = {
        "class_ceiling": class_ceiling,
        "weight_ceiling": weight_ceiling,
        "exclusive": exclusive,
        "opaque_kernels": opaque_kernels,
        "disabled": disabled,
        "description": description,
    }
    try:
        request = SetTenantRequest.model_validate({"tenant": name} | changes)
    except ValidationError as e:
        wrong = e.errors()[0]
        raise fail(ControlError(f"{wrong['loc'][0]}: {wrong['msg'].lower()}")) from e
    changed = _ask(contracts.ROUTER_TENANT_SET, request)
    if as_json:
        print(json.dumps(changed.model_dump(mode="json")))
    else:
        _print([changed])
