"""A cluster with three tenants: Alice is the victim, Bob the attacker, Carol an uninvolved neighbour.

It has a real nats-server with keys, a router that requires tokens, a scheduler, metering and an executor. An attacker has only
what such an attacker would have in practice. There is one module per kind of attacker. All modules of a test process share one
cluster, except modules that need other settings: these have their own fixture `cluster`.
"""

import contextlib

import pytest
from wooly_testkit.certificates import make_certificates
from wooly_testkit.cluster import Cluster, Tenant


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The folder of the shared cluster's keys, sockets and logs."""
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="session")
def certificates(folder):
    """The certificates of the shared cluster's executor."""
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
        # On a busy machine a test takes longer than the default lease, which nobody renews for a plain channel.
        yield Cluster(folder, stack, executor=executor, router={"LEASE_S": "60"})


@pytest.fixture(scope="module")
def cluster(shared):
    return shared


@pytest.fixture(scope="module")
def tenants(cluster):
    made = {"alice": Tenant(cluster, "alice", class_ceiling=0)}  # Alice may use the highest class, unlike the others
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
