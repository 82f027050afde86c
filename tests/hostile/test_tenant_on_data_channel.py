"""The attacker is a tenant whose session is open, on its data channel."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from wooly_bus import subjects
from wooly_bus.errors import BusError
from wooly_testkit.cluster import Cluster, Tenant, enter
from wooly_wis.codec import digest, encode_program
from wooly_wis.dtypes import DType
from wooly_wis.frames import Kind, pack_run
from wooly_wis.messages import RenewSessionReply, RenewSessionRequest
from wooly_wis.program import Form, Instruction, Operand, OperandRef, Program, Role, View

pytestmark = pytest.mark.connected

# -- the device held -----------------------------------------------------------------------------------------------------

LEASE_S = 1.5
#: Rows of a matrix whose exponential takes a core about three leases: one call of the library, which nothing interrupts.
ROWS = 2000


def long_operator():
    """A program that is one long operator on a matrix of ones."""
    nbytes = ROWS * ROWS * 4
    matrix = View(DType.F32, (ROWS, ROWS), (ROWS, 1), 0)
    attrs = (("args", (OperandRef(0),)), ("kwargs", ()), ("name", "aten.linalg_matrix_exp.default"))
    forms = (
        Form("alloc", (Operand(Role.OUT, View(DType.U8, (nbytes,), (1,), 0)),)),
        Form("fill", (Operand(Role.OUT, matrix),), (), (("value", 1.0),)),
        Form("extern", (Operand(Role.IN, matrix), Operand(Role.OUT, matrix)), (), attrs),
    )
    body = (Instruction(0, (0,)), Instruction(1, (0,)), Instruction(0, (1,)), Instruction(2, (0, 1)))
    return encode_program(Program(forms, body))


class Renewing:
    """Renews a session's lease as a client does, and notes what goes wrong."""

    def __init__(self, tenant, opened):
        self.errors = []
        self._tenant, self._stop = tenant, threading.Event()
        self._request = RenewSessionRequest(session_id=opened.session_id, token=opened.token)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _run(self):
        while not self._stop.wait(LEASE_S / 6):
            try:
                self._tenant.ask(subjects.ROUTER_SESSION_RENEW, self._request, RenewSessionReply)
            except BusError as e:
                self.errors.append(str(e))


def test_holding_the_device_for_several_leases_ends_nobodys_session(tmp_path):
    with contextlib.ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, router={"LEASE_S": str(LEASE_S)})
        alice, bob, carol = (Tenant(cluster, name) for name in ("alice", "bob", "carol"))
        for tenant in (alice, bob, carol):
            stack.callback(tenant.control.close)
        opened = alice.open()
        renewing = stack.enter_context(Renewing(alice, opened))
        victim, _ = enter(opened)
        attacker, _ = enter(bob.open())
        program = long_operator()
        attacker.send(Kind.DEFINE, program)
        attacker.send(Kind.RUN, pack_run(digest(program), [1, 2], b"", []))
        with ThreadPoolExecutor(4) as pool:  # and others ask for what needs the device
            opening = [pool.submit(carol.open) for _ in range(3)]
            until = time.monotonic() + 2 * LEASE_S
            while time.monotonic() < until:
                assert alice.story(opened.session_id)[-1] == "started", renewing.errors
                time.sleep(LEASE_S / 4)
            for other in opening:
                with contextlib.suppress(BusError):  # the device may be away for longer than a client waits
                    carol.close(other.result())
        victim.send(Kind.SYNC)
        assert victim.recv(60).kind == Kind.RESULT
        assert renewing.errors == []
        for channel in (victim, attacker):
            channel.close()
