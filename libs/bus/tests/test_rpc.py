"""ControlClient where things go wrong: closed, gone and returned servers, nonsense addresses, silence."""

import socket
import subprocess
import sys
import threading
import time

import pytest
from wooly_bus.contract_types import Event, Rpc
from wooly_bus.errors import BusConnectError, BusError, BusTimeoutError, NoResponderError
from wooly_bus.rpc import ControlClient
from wooly_testkit.nats import nats_server as start_nats_server
from wooly_wis.messages import CloseSessionReply, NodesRequest

pytestmark = pytest.mark.connected
NOBODY = Rpc("wooly.v1.rpc.test.no.body", NodesRequest, CloseSessionReply)


def test_closed_client_says_so_and_leaves_no_thread(nats_server):
    before = threading.active_count()
    client = ControlClient(nats_server)
    client.close()
    client.close()
    assert threading.active_count() == before
    with pytest.raises(BusConnectError, match="is closed"):
        client.request(NOBODY, NodesRequest())


def test_client_that_is_closed_while_a_thread_waits_ends_its_wait(nats_server):
    rpc, found = Rpc("wooly.v1.rpc.test.silent.body", NodesRequest, CloseSessionReply), []

    def ask():
        try:
            client.request(rpc, NodesRequest(), timeout=60)
        except BusError as e:
            found.append(e)

    silent, client = ControlClient(nats_server), ControlClient(nats_server)
    with silent.hearing(Event(rpc.subject, NodesRequest)) as heard:
        asking = threading.Thread(target=ask)
        asking.start()
        heard.get(timeout=20)
        client.close()
        asking.join(20)
    silent.close()
    assert [type(e) for e in found] == [BusConnectError] and "is closed" in str(found[0])


@pytest.mark.parametrize(
    "url", ["nats://no-such-host.invalid:4222", "nats://127.0.0.1:9", "nonsense://x", "nats://[::"]
)
def test_address_without_a_server_fails_in_time_and_names_it(url):
    before, started = threading.active_count(), time.monotonic()
    with pytest.raises(BusConnectError) as caught:
        ControlClient(url, timeout=0.3)
    assert url in str(caught.value) and not str(caught.value).endswith(": ")
    assert time.monotonic() - started < 4 and threading.active_count() == before


def test_server_that_says_nothing_fails_in_time():
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(BusConnectError, match="no NATS server answers"):
        ControlClient(f"nats://127.0.0.1:{mute.getsockname()[1]}", timeout=0.3)


def test_client_comes_back_when_the_server_does():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with start_nats_server("-p", port) as url:
        client = ControlClient(url)
        with pytest.raises(NoResponderError):
            client.request(NOBODY, NodesRequest())
    with pytest.raises(BusError):
        client.request(NOBODY, NodesRequest(), timeout=0.3)
    with start_nats_server("-p", port):
        deadline = time.monotonic() + 10
        while True:
            try:
                client.request(NOBODY, NodesRequest(), timeout=1)
            except NoResponderError:
                break
            except (BusTimeoutError, BusConnectError):
                assert time.monotonic() < deadline
    client.close()


def test_program_that_forgets_to_close_ends_without_noise_and_has_not_imported_faststream(nats_server):
    code = (
        f"import sys; from wooly_bus.rpc import ControlClient; c = ControlClient({nats_server!r}); "
        "sys.exit('faststream' in sys.modules or 'opentelemetry.sdk' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_messages_do_not_hold_passwords(nats_server):
    with pytest.raises(BusConnectError) as caught:
        ControlClient("nats://user:secret@127.0.0.1:1,nats://user:secret@127.0.0.1:2", timeout=0.3)
    assert "secret" not in str(caught.value) and "127.0.0.1:1" in str(caught.value)
