"""Cluster settings, nodes, groups and the audit log."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from wooly_bus.errors import RefusedError
from wooly_wis.messages import NodeInfo, NodesRequest, SessionMemory

from wooly_router.core.cluster import ClusterConfig, overcommit_of
from wooly_router.gate import Caller
from wooly_router.rest.access import Access, needs
from wooly_router.rest.models import (
    AuditEntry,
    AuditPage,
    Group,
    GroupBody,
    GroupList,
    Node,
    NodeConfig,
    NodeId,
    NodeList,
    NodeState,
    PathName,
)
from wooly_router.state.nodes import GroupRecord, NodeRecord
from wooly_router.state.world import World

router = APIRouter()


def _world(request: Request) -> World:
    world: World = request.app.state.actor.world
    return world


# -- config ----------------------------------------------------------------------------------------------------------


@router.get("/config")
async def read_config(request: Request, caller: Annotated[Caller, Depends(needs("config", "read"))]) -> ClusterConfig:
    """Return the settings in force."""
    return (await _world(request).settings())[0]


@router.put("/config")
async def write_config(
    request: Request, config: ClusterConfig, caller: Annotated[Caller, Depends(needs("config", "write"))]
) -> ClusterConfig:
    """Change the given settings; the others stay."""
    access: Access = request.app.state.access
    given = config.model_dump(include=config.model_fields_set)
    await _world(request).config.write(given, request.app.state.actor.clock(), caller.actor)
    await access.log(caller, "config.write", "config", **given)
    return (await _world(request).settings())[0]


# -- nodes -----------------------------------------------------------------------------------------------------------


async def nodes_of(request: Request, tenant: str | None = None) -> list[Node]:
    """Return all nodes. A caller of one tenant sees all sessions of other tenants as one session without a name."""
    world, actor = _world(request), request.app.state.actor
    config, records = await world.settings()
    rooms = await actor.rooms()
    gpus: dict[str, list[dict[str, object]]] = {}
    for info in (await actor.on_nodes(NodesRequest())).nodes:
        seen = seen_by(info, tenant).model_dump() | {
            "room": asdict(rooms[info.executor_id]) if info.executor_id in rooms else None
        }
        gpus.setdefault(info.node, []).append(seen)
    tasks: dict[str, int] = {}
    for task in await world.tasks.in_states("pending", "started"):
        for node in {p.node for p in task.parts}:
            tasks[node] = tasks.get(node, 0) + 1
    found = []
    for name in sorted(records.keys() | gpus.keys()):
        record = records.get(name) or NodeRecord(name)
        alive = any(g["state"] == "alive" for g in gpus.get(name, ()))
        state: str = record.wish if alive else "lost"
        if state == "draining" and not tasks.get(name):
            state = "drained"
        found.append(
            Node.model_validate(
                {
                    "node_id": name,
                    "state": state,
                    "wish": record.wish,
                    "groups": sorted(record.groups),
                    "overcommit_vram_percent": record.overcommit_vram_percent,
                    "effective_overcommit_vram_percent": overcommit_of(record, config),
                    "tasks": tasks.get(name, 0),
                    "gpus": gpus.get(name, []),
                }
            )
        )
    return found


def seen_by(info: NodeInfo, tenant: str | None) -> NodeInfo:
    """Return a device as a caller sees it that sees one tenant's sessions (None: all sessions)."""
    if tenant is None or info.memory is None:
        return info
    mine = [s for s in info.memory.sessions if s.tenant == tenant]
    theirs = [s for s in info.memory.sessions if s.tenant != tenant]
    if theirs:
        sums = {f: sum(getattr(s, f) for s in theirs) for f in ("own", "shared", "host", "disk", "promised")}
        mine.append(SessionMemory(session_id="others", **sums))
    return info.model_copy(update={"memory": info.memory.model_copy(update={"sessions": tuple(mine)})})


async def _node(request: Request, node_id: str, tenant: str | None = None) -> Node:
    for node in await nodes_of(request, tenant):
        if node.node_id == node_id:
            return node
    raise RefusedError("router.no_node", f"node {node_id} does not exist")


@router.get("/nodes")
async def list_nodes(request: Request, caller: Annotated[Caller, Depends(needs("nodes", "read"))]) -> NodeList:
    """All nodes with their devices."""
    return NodeList(nodes=await nodes_of(request, caller.tenant))


@router.get("/nodes/{node_id}")
async def get_node(
    request: Request, node_id: NodeId, caller: Annotated[Caller, Depends(needs("nodes", "read"))]
) -> Node:
    """One node."""
    return await _node(request, node_id, caller.tenant)


@router.put("/nodes/{node_id}/config")
async def configure_node(
    request: Request, node_id: NodeId, body: NodeConfig, caller: Annotated[Caller, Depends(needs("nodes", "write"))]
) -> Node:
    """Set how much of a node's memory may be promised beyond its capacity. It applies to new placements."""
    access: Access = request.app.state.access
    if not await _world(request).nodes.set_overcommit(node_id, body.overcommit_vram_percent):
        raise RefusedError("router.no_node", f"node {node_id} does not exist")
    await access.log(caller, "node.configure", node_id, overcommit_vram_percent=body.overcommit_vram_percent)
    return await _node(request, node_id)


@router.put("/nodes/{node_id}/state")
async def set_node_state(
    request: Request, node_id: NodeId, body: NodeState, caller: Annotated[Caller, Depends(needs("nodes", "write"))]
) -> Node:
    """Cordon or drain a node, or let it take tasks again."""
    await request.app.state.actor.set_node_state(caller, node_id, body.state)
    return await _node(request, node_id)


# -- groups ----------------------------------------------------------------------------------------------------------


def _group(record: GroupRecord) -> Group:
    return Group(
        name=record.name, description=record.description, created_at=record.created_at, nodes=list(record.nodes)
    )


@router.get("/groups")
async def list_groups(request: Request, caller: Annotated[Caller, Depends(needs("groups", "read"))]) -> GroupList:
    """All groups."""
    return GroupList(groups=[_group(g) for g in await _world(request).nodes.groups()])


@router.put("/groups/{name}")
async def put_group(
    request: Request, name: PathName, body: GroupBody, caller: Annotated[Caller, Depends(needs("groups", "write"))]
) -> Group:
    """Create or replace a group. Its nodes leave the common pool."""
    world, access = _world(request), request.app.state.access
    record = GroupRecord(name, body.description, request.app.state.actor.clock(), tuple(body.nodes))
    await world.nodes.put_group(record)
    await access.log(caller, "group.put", name, nodes=body.nodes[:100])
    (found,) = [g for g in await world.nodes.groups() if g.name == name]
    return _group(found)


@router.delete("/groups/{name}", status_code=204)
async def delete_group(
    request: Request, name: PathName, caller: Annotated[Caller, Depends(needs("groups", "write"))]
) -> Response:
    """Delete a group."""
    access: Access = request.app.state.access
    if not await _world(request).nodes.remove_group(name):
        raise RefusedError("router.no_group", f"group {name} does not exist")
    await access.log(caller, "group.delete", name)
    return Response(status_code=204)


# -- audit -----------------------------------------------------------------------------------------------------------


@router.get("/audit")
async def audit(
    request: Request,
    caller: Annotated[Caller, Depends(needs("audit", "read"))],
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Query(ge=1, lt=1 << 63)] = None,
) -> AuditPage:
    """Return the audit log: who changed what."""
    found = await _world(request).audit.page(limit, before)
    return AuditPage(entries=[AuditEntry(**{f: getattr(r, f) for f in AuditEntry.model_fields}) for r in found])
