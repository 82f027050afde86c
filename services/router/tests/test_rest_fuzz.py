"""Calls every operation of the OpenAPI document with valid and invalid arguments, against a router's process.

No answer is a server error, every answer matches the document, and arguments that violate the schema are refused.
"""

import contextlib
import os
import time

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from wooly_testkit.forks import Forked
from wooly_testkit.nats import nats_server as start_nats_server

pytestmark = [pytest.mark.connected, pytest.mark.timeout(180)]
EXAMPLES = int(os.environ.get("WOOLY_FUZZ_COUNT", "5"))


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def rest_url(request, tmp_path_factory):
    """A router's process with tenants that have all rights, on its own nats-server."""
    directory = tmp_path_factory.mktemp("router")
    with start_nats_server() as nats:
        env = {
            "WOOLY_ROUTER_NATS_URL": nats,
            "WOOLY_ROUTER_STATE_DIR": str(directory),
            "WOOLY_ROUTER_HTTP_PORT": "0",
            "WOOLY_ROUTER_RATE_LIMIT": "1e6",
        }
        if request.param == "postgresql":
            env["WOOLY_ROUTER_DATABASE_URL"] = request.getfixturevalue("postgres").database()
        process = Forked("wooly_router", env=os.environ | env)
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError, httpx.HTTPError):
                    url = f"http://127.0.0.1:{(directory / 'router.port').read_text()}"
                    httpx.get(f"{url}/healthz", trust_env=False).raise_for_status()
                    yield url
                    break
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()


def test_operations_match_their_openapi_document(rest_url):
    document = httpx.get(f"{rest_url}/openapi.json", trust_env=False).json()
    del document["components"]["securitySchemes"]  # this router requires no tokens; other tests cover tokens
    for path in document["paths"].values():
        for operation in path.values():
            operation.pop("security", None)
    import schemathesis  # takes long, and all processes of a test run read this file

    api = schemathesis.openapi.from_dict(document)
    operations = [result.ok() for result in api.get_all_operations()]
    assert len(operations) >= 25
    failures = []
    for operation in operations:
        try:
            fuzz(operation, rest_url)
        except (AssertionError, BaseExceptionGroup) as e:
            failures.append(f"{operation.label}: {e}")
    assert not failures, "\n\n".join(failures)


def fuzz(operation, rest_url):
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    wanted = (
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.negative_data_rejection,
    )
    modes = [operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode]

    @given(case=st.one_of(modes))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def call(case):
        case.call_and_validate(base_url=rest_url, checks=wanted)

    call()
