"""A cluster with three tenants: Alice is the victim, Bob the attacker, Carol an innocent neighbour.

Real nats-server with keys, router that asks for tokens, scheduler, metering, executor; attackers have what such a person has, and
nothing else. One module per kind of attacker. All modules of one test process share one cluster, except those that need other
settings: they have a fixture `cluster` of their own.
"""

import contextlib

import pytest
from wooly_testkit.certificates import make_certificates
from wooly_testkit.cluster import Cluster, Tenant


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Of the shared cluster's keys, sockets and logs."""
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="session")
def certificates(folder):
    """Of the shared cluster's executor."""
    return make_certificates(folder, "localhost")


@pytest.fixture(scope="session")
def shared(folder, certificates):
    executor = {
        "LISTEN": f"unix://{folder}/x.sock,tls://localhost:0",
        "TLS_CERT": str(certificates.certificate),
        "TLS_KEY": str(certificates.key),
        "TUNNELS": "8",
        "TUNNELS_PER_TENANT": "4",
    }
    with contextlib.ExitStack() as stack:
        yield Cluster(folder, stack, executor=executor)


@pytest.fixture(scope="module")
def cluster(shared):
    return shared


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
