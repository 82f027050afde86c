"""The command `wooly nodes`."""

from __future__ import annotations

import json
import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from wooly.cli.commands.app import Json, app, fail, out, read_settings
from wooly.cli.commands.cluster import nodes_of, print_nodes
from wooly.control import connect
from wooly.errors import WoolyError

if TYPE_CHECKING:
    from wooly_wis.messages import SetNodeStateReply

nodes = typer.Typer(name="nodes", help="List the executors, or change their nodes.", invoke_without_command=True)
app.add_typer(nodes)
Node = Annotated[str, typer.Argument(metavar="NODE", help="The node's name, as `wooly nodes` shows it.")]
#: Seconds between two looks at a node that is being drained.
LOOK_S = 1.0


@nodes.callback()
def list_nodes(context: typer.Context, as_json: Json = False) -> None:
    """List the executors that the controller knows, or change a node with one of the commands below."""
    if context.invoked_subcommand is not None:
        return
    try:
        found = nodes_of(read_settings())
    except WoolyError as e:
        raise fail(e) from e
    if as_json:
        print(json.dumps({"nodes": found}))
    else:
        print_nodes(found)


def _set(node: str, state: Literal["active", "cordoned", "draining"]) -> SetNodeStateReply:
    from wooly_bus import contracts
    from wooly_wis.messages import SetNodeStateRequest

    settings = read_settings()
    request = SetNodeStateRequest(node=node, state=state, credential=settings.credential)
    try:
        with closing(connect(settings)) as controller:
            return controller.ask(contracts.ROUTER_NODE_SET, request)
    except WoolyError as e:
        raise fail(e) from e


def _tell(reply: SetNodeStateReply, as_json: bool) -> None:
    if as_json:
        print(reply.model_dump_json())
        return
    count, moving = len(reply.tasks), len(reply.moving)
    left = f"{count} task{'s' * (count != 1)} left" + (f", of which {moving} will move" if moving else "")
    out.print(f"node {reply.node}: {reply.state}, {left if count else 'without tasks'}", highlight=False)


@nodes.command()
def drain(
    node: Node,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until no task is left.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait; then the command fails, and draining goes on.")
    ] = 3600.0,
    as_json: Json = False,
) -> None:
    """Let a node take no new tasks, move its sessions to other nodes, and wait until no task is left."""
    deadline, before = time.monotonic() + timeout_s, None
    while True:
        reply = _set(node, "draining")
        if not as_json and (reply.tasks, reply.moving) != before:
            _tell(reply, as_json)
        before = reply.tasks, reply.moving
        if no_wait or not reply.tasks or time.monotonic() >= deadline:
            break
        time.sleep(LOOK_S)
    if as_json:
        _tell(reply, as_json)
    if reply.tasks and not no_wait:
        raise fail(
            WoolyError(
                f"node {node} still has {', '.join(reply.tasks)}; see why with `wooly logs TASK`, or end them with "
                "`wooly tasks cancel TASK`"
            )
        )


@nodes.command()
def cordon(node: Node, as_json: Json = False) -> None:
    """Let a node take no new tasks. Its tasks stay."""
    _tell(_set(node, "cordoned"), as_json)


@nodes.command()
def activate(node: Node, as_json: Json = False) -> None:
    """Let a node take tasks again."""
    _tell(_set(node, "active"), as_json)
