"""One cluster per module, with three tenants: Alice is the victim, Bob the attacker, Carol an innocent neighbour.

Real nats-server with keys, router that asks for tokens, scheduler, metering, executor; attackers have what such a person has, and
nothing else. One module per kind of attacker.
"""

import contextlib

import pytest
from wooly_testkit.cluster import Cluster, Tenant


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the cluster's keys, sockets and logs."""
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def executor_settings():
    """Settings of the executor beside the usual ones, without their prefix; a module may have others."""
    return {}


@pytest.fixture(scope="module")
def router_settings():
    """The same of the router."""
    return {}


@pytest.fixture(scope="module")
def cluster(folder, executor_settings, router_settings):
    with contextlib.ExitStack() as stack:
        yield Cluster(folder, stack, executor=executor_settings, router=router_settings)


@pytest.fixture(scope="module")
def tenants(cluster):
    made = {"alice": Tenant(cluster, "alice", class_ceiling=0)}  # who may be in a hurry, unlike the others
    made |= {name: Tenant(cluster, name) for name in ("bob", "carol")}
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
