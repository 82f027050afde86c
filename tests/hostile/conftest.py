"""One cluster per module, with three tenants: Alice is the victim, Bob the attacker, Carol an innocent neighbour.

Real nats-server with keys, router that asks for tokens, scheduler, metering, executor; attackers have what such a person has, and
nothing else. One module per kind of attacker.
"""

import contextlib

import pytest
from wooly_testkit.cluster import Cluster, Tenant


@pytest.fixture(scope="module")
def cluster(request, tmp_path_factory):
    """A module's `ROUTER`: settings of its router."""
    with contextlib.ExitStack() as stack:
        settings = getattr(request.module, "ROUTER", None)
        yield Cluster(tmp_path_factory.mktemp("cluster"), stack, router=settings)


@pytest.fixture(scope="module")
def tenants(cluster):
    made = {name: Tenant(cluster, name) for name in ("alice", "bob", "carol")}
    yield made
    for tenant in made.values():
        tenant.control.close()


@pytest.fixture
def alice(tenants):
    return tenants["alice"]


@pytest.fixture
def bob(tenants):
    return tenants["bob"]


@pytest.fixture
def carol(tenants):
    return tenants["carol"]
