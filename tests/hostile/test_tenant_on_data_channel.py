"""The attacker is a tenant with an open session, on the data channel."""

import contextlib
import itertools
import json
import os
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from wooly_bus import contracts
from wooly_bus.channel import ChannelError
from wooly_bus.channel.framing import ChannelClosedError
from wooly_bus.contents import chunk_digest, content_id
from wooly_bus.errors import BusError
from wooly_testkit.cluster import Cluster, Tenant, enter
from wooly_wis.assembly import row_major
from wooly_wis.codec import digest, encode_program
from wooly_wis.collectives import Collective, Range, Reduction, What, pack_collective
from wooly_wis.dtypes import DType
from wooly_wis.foreign import Source, encode_source
from wooly_wis.frames import CONTENT, READ_HEAD, WRITE_HEAD, Kind, pack_json, pack_run
from wooly_wis.messages import RenewSessionRequest
from wooly_wis.program import Form, Instruction, Operand, OperandRef, Program, Role, View

pytestmark = pytest.mark.connected

# -- the device held -----------------------------------------------------------------------------------------------------

LEASE_S = 1.0
#: Rows of a matrix whose exponential takes a core about three leases: one library call, which cannot be interrupted.
ROWS = 1700


def long_operator():
    """A program with one long operator on a matrix of ones."""
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
    """Renews a session's lease like a client, and records errors."""

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
                self._tenant.ask(contracts.ROUTER_SESSION_RENEW, self._request)
            except BusError as e:
                self.errors.append(str(e))


@pytest.mark.slow  # the executor's test of a held device shows that leases are renewed
def test_long_operator_ends_no_other_session(tmp_path):
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
        with ThreadPoolExecutor(4) as pool:  # meanwhile, other clients request work from the device
            opening = [pool.submit(carol.open) for _ in range(3)]
            until = time.monotonic() + 2 * LEASE_S
            while time.monotonic() < until:
                assert alice.story(opened.session_id)[-1] == "started", renewing.errors
                time.sleep(LEASE_S / 4)
            for other in opening:
                with contextlib.suppress(BusError):  # the device may be busy for longer than a client's timeout
                    carol.close(other.result())
        victim.send(Kind.SYNC)
        assert victim.recv(60).kind == Kind.RESULT
        assert renewing.errors == []
        for channel in (victim, attacker):
            channel.close()


# -- class and weight ------------------------------------------------------------------------------------------------

#: Floats in the buffer that a run fills, and repetitions: a run takes some milliseconds.
FLOATS, TIMES = 1 << 20, 12
#: Runs per answer, and batches of them in flight: a further run is always waiting.
BATCH, AHEAD = 4, 3


def _alloc():
    return encode_program(
        Program(
            (Form("alloc", (Operand(Role.OUT, View(DType.U8, (4 * FLOATS,), (1,), 0)),)),),
            (Instruction(0, (0,)),),
        )
    )


def _work():
    form = Form("fill", (Operand(Role.OUT, View(DType.F32, (FLOATS,), (1,), 0)),), (), (("value", 1.0),))
    return encode_program(Program((form,), (Instruction(0, (0,)),) * TIMES))


class Saturating:
    """A client that always has queued runs; `runs` counts those that were answered."""

    def __init__(self, opened):
        self.channel, welcome = enter(opened)
        assert welcome.kind == Kind.WELCOME
        self.runs, self.ending = 0, threading.Event()
        for raw in (_alloc(), _work()):
            self.channel.send(Kind.DEFINE, raw)
        self.channel.send(Kind.RUN, pack_run(digest(_alloc()), [8], b"", []))
        self.thread = threading.Thread(target=self._drive)

    def _drive(self):
        name = digest(_work())
        for batch in itertools.count():
            for _ in range(BATCH):
                self.channel.send(Kind.RUN, pack_run(name, [8], b"", []))
            self.channel.send(Kind.SYNC)
            if batch >= AHEAD:
                self._answered()
            if self.ending.is_set():
                return

    def _answered(self):
        frame = self.channel.recv(60)
        assert frame.kind == Kind.RESULT, bytes(frame.payload)
        self.runs += BATCH

    def end(self):
        self.ending.set()
        self.thread.join(60)
        self.channel.close()


# -- class and weight ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sessions", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_neighbour_of_saturating_p0_keeps_share(cluster, bob, carol, sessions):
    """P0 gets 20 % of the device, and the rest is shared. Next to one session of bob, carol should get 40 % of all runs."""
    cluster.rest("PUT", "tenants/bob", {"class_ceiling": 0})
    opened = [(bob, bob.open(priority=0)) for _ in range(sessions)] + [(carol, carol.open())]
    clients = [Saturating(session) for _, session in opened]
    try:
        for client in clients:
            client.thread.start()
        cluster.wait(lambda: all(c.runs for c in clients[:-1]))
        before = [c.runs for c in clients]
        cluster.wait(lambda: sum(c.runs for c in clients[:-1]) - sum(before[:-1]) >= 200)
        his, hers = sum(c.runs for c in clients[:-1]) - sum(before[:-1]), clients[-1].runs - before[-1]
        # Half of the fair share: runs are counted, not measured.
        assert hers >= 0.5 * his / (1.5 * sessions), (
            his,
            hers,
        )
    finally:
        for client in clients:
            client.end()
        for tenant, session in opened:
            tenant.close(session)
        cluster.rest("PUT", "tenants/bob", {"class_ceiling": 2})


# -- much work out of few bytes ------------------------------------------------------------------------------------------


def reduction_of_one_number(opcode, rows, columns, dims, kept):
    """A program that reduces a matrix with one element in memory: all strides are 0."""
    results = View(DType.F32, (kept,) if kept else (), (1,) if kept else ())
    matrix = View(DType.F32, (rows, columns), (0, 0))
    forms = (
        Form("alloc", (Operand(Role.OUT, View(DType.U8, (4,), (1,))),)),
        Form("alloc", (Operand(Role.OUT, View(DType.U8, (results.end,), (1,))),)),
        Form(opcode, (Operand(Role.OUT, results), Operand(Role.IN, matrix)), (), (("args", (OperandRef(1), dims)),)),
    )
    if not kept:
        forms = (forms[0], forms[2])
        body = (Instruction(0, (0,)), Instruction(0, (1,)), Instruction(1, (1, 0)))
    else:
        body = (Instruction(0, (0,)), Instruction(1, (1,)), Instruction(2, (1, 0)))
    return encode_program(Program(forms, body))


def test_huge_sum_over_stride_zero_is_refused_with_numbers(bob):
    channel, _ = enter(bob.open())
    program = reduction_of_one_number("sum", 1 << 16, 1 << 16, (0, 1), 0)
    channel.send(Kind.DEFINE, program)
    channel.send(Kind.SYNC)
    answer = channel.recv(20)
    error = json.loads(bytes(answer.payload))
    assert answer.kind == Kind.ERROR and error["code"] == "executor.too_much_work" and error["instruction"] == 2
    assert "elements, but at most" in error["message"] and "WOOLY_EXECUTOR_MAX_ELEMENTS" in error["message"]
    channel.close()


def test_large_instruction_is_split_and_ends_with_session(alice, bob):
    victim, _ = enter(alice.open())
    opened = bob.open()
    attacker, _ = enter(opened)
    large = reduction_of_one_number("amax", 1 << 20, 1 << 12, (1,), 1 << 20)
    small = reduction_of_one_number("amax", 4, 4, (1,), 4)
    attacker.send(Kind.DEFINE, large)
    attacker.send(Kind.RUN, pack_run(digest(large), [1, 2], b"", []))
    attacker.send(Kind.SYNC)
    victim.send(Kind.DEFINE, small)

    def step(k):
        victim.send(Kind.RUN, pack_run(digest(small), [2 * k + 1, 2 * k + 2], b"", []))
        victim.send(Kind.SYNC)
        return victim.recv(60).kind

    assert [step(k) for k in range(5)] == [Kind.RESULT] * 5
    bob.close(opened)
    # As a single library call, it would have finished and answered before the victim's steps.
    with pytest.raises(ChannelClosedError, match="closed by"):
        attacker.recv(60)
    assert step(5) == Kind.RESULT
    for channel in (victim, attacker):
        channel.close()


# -- memory that another tenant has freed --------------------------------------------------------------------------------

SECRET = bytes(range(1, 17))
BATCH, STEPS, LABELS, CLASSES = 4, 60, 41, 5
REFS = tuple([OperandRef(k) for k in range(7)])


class Talk:
    """A tenant's session and its data channel."""

    def __init__(self, tenant):
        self.tenant, self.opened = tenant, tenant.open()
        self.channel, welcome = enter(self.opened)
        assert welcome.kind == Kind.WELCOME

    def close(self):
        self.channel.close()
        self.tenant.close(self.opened)

    def run(self, forms, bindings, frees=()):
        """Run a program with one instruction per form, with slots in order; `bindings` are per form. Returns the answer."""
        slots = {buffer: k for k, buffer in enumerate(dict.fromkeys(b for each in bindings for b in each))}
        body = [Instruction(k, tuple([slots[b] for b in each])) for k, each in enumerate(bindings)]
        raw = encode_program(Program(tuple(forms), tuple(body)))
        self.channel.send(Kind.DEFINE, raw)
        self.channel.send(Kind.RUN, pack_run(digest(raw), list(slots), b"", list(frees), reply=True))
        frame = self.channel.recv(20)
        assert frame.kind == Kind.RESULT, bytes(frame.payload)
        return json.loads(bytes(frame.payload))

    def put(self, buffer, data):
        """Create a buffer with these bytes."""
        self.run([alloc(len(data))], [[buffer]])
        self.channel.send(Kind.WRITE, WRITE_HEAD.pack(buffer, 0), data)

    def read(self, buffer, nbytes):
        self.channel.send(Kind.READ, READ_HEAD.pack(buffer, 0, nbytes))
        into = bytearray(nbytes)
        assert self.channel.recv_data(memoryview(into), Kind.DATA) is None
        return bytes(into)


def dense(dtype, *sizes):
    return View(dtype, sizes, row_major(sizes))


def alloc(nbytes):
    return Form("alloc", (Operand(Role.OUT, dense(DType.U8, nbytes)),))


def call(name, operands, results, args):
    found = [Operand(Role.IN, v) for v in operands] + [Operand(Role.OUT, v) for v in results]
    return Form("extern", tuple(found), (), (("args", args), ("kwargs", ()), ("name", name)))


@pytest.fixture
def talks(alice, bob):
    made = [Talk(alice), Talk(bob)]
    yield made
    for talk in made:
        talk.close()


def keep_and_free(talk, nbytes, times=64):
    """Write Alice's secret to memory, and free her buffers."""
    for k in range(100, 100 + times):
        talk.put(k, (SECRET * (nbytes // len(SECRET) + 1))[:nbytes])
    talk.run([alloc(4)], [[99]], frees=range(99, 100 + times))


def test_unwritten_log_alpha_reveals_no_memory(talks):
    alice, bob = talks
    shapes = dense(DType.F32, STEPS, BATCH, CLASSES), dense(DType.I64, BATCH, LABELS)
    bob.put(1, struct.pack("<f", -1.5) * shapes[0].numel)
    bob.put(2, struct.pack("<q", 1) * shapes[1].numel)
    loss, log_alpha = dense(DType.F32, BATCH), dense(DType.F32, BATCH, STEPS, 2 * LABELS + 1)
    args = (*REFS[:2], (12, 3, 2, 1), (LABELS, 1, 1, 0), 0, True)  # nearly all of the result is beyond these lengths
    ctc = call("aten._ctc_loss.default", shapes, (loss, log_alpha), args)
    for _ in range(3):
        keep_and_free(alice, log_alpha.end)
        bob.run([alloc(loss.end), alloc(log_alpha.end), ctc], [[3], [4], [1, 2, 3, 4]])
        found = bob.read(4, log_alpha.end)
        assert SECRET not in found
        assert found.count(bytes(4)) > 18_000  # of 19,920
        bob.run([alloc(4)], [[5]], frees=[3, 4, 5])


def test_workspace_of_recurrent_layer_reveals_no_memory(talks):
    alice, bob = talks
    steps, batch, width, hidden = 20, 8, 16, 32
    sizes = [
        (steps, batch, width),
        (4 * hidden, width),
        (4 * hidden, hidden),
        *[(4 * hidden,)] * 2,
        *[(batch, hidden)] * 2,
    ]
    views = [dense(DType.F32, *s) for s in sizes]
    for k, v in enumerate(views, 1):
        bob.put(k, struct.pack("<f", 0.5) * v.numel)
    args = (*REFS, False, (), 2, hidden, 1, True, False, False, True)
    layer = call("aten.mkldnn_rnn_layer.default", views, [None] * 4, args)
    for _ in range(3):
        answer = bob.run([layer], [[*range(1, 8), 11, 12, 13, 14]])
        workspace = answer["outputs"][3]["nbytes"]
        assert SECRET not in bob.read(14, workspace)
        bob.run([alloc(4)], [[15]], frees=[11, 12, 13, 14, 15])
        keep_and_free(alice, workspace)


def flat(dtype, n):
    return View(dtype, (n,), (1,), 0)


def allocates(nbytes):
    """The definition of a program that allocates one buffer."""
    form = Form("alloc", (Operand(Role.OUT, flat(DType.U8, nbytes)),))
    return encode_program(Program((form,), (Instruction(0, (0,)),)))


def additions(forms, first):
    """The definition of a new program with this many forms."""
    attrs = (("args", (OperandRef(0), OperandRef(1))), ("kwargs", ()), ("name", "aten.add_.Tensor"))
    found = [Form("alloc", (Operand(Role.OUT, flat(DType.U8, 1 << 25)),))]
    body = [Instruction(0, (0,)), Instruction(0, (1,))]
    for k in range(forms):
        v = flat(DType.F32, first + k + 1)
        found.append(Form("extern", (Operand(Role.INOUT, v), Operand(Role.IN, v)), (), attrs))
        body.append(Instruction(k + 1, (0, 1)))
    return encode_program(Program(tuple(found), tuple(body)))


def session_with_buffer(tenant, nbytes=1 << 20):
    """A tenant's session with one buffer, number 1."""
    channel, answer = enter(tenant.open())
    assert answer.kind == Kind.WELCOME
    raw = allocates(nbytes)
    channel.send(Kind.DEFINE, raw)
    channel.send(Kind.RUN, pack_run(digest(raw), [1], b"", []))
    assert answers_correctly(channel)
    return channel


def answers_correctly(channel):
    """Whether a session answers with the contents of its buffer."""
    channel.send(Kind.READ, READ_HEAD.pack(1, 0, 8))
    into = bytearray(8)
    return channel.recv_data(memoryview(into), Kind.DATA) is None and not any(into)


def resident(cluster):
    """The executor's resident memory, in bytes."""
    pages = Path(f"/proc/{cluster.processes['x'].pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Flood:
    """Sends frames for a second, or until the executor accepts no more or ends the session."""

    def __init__(self, channel, frames):
        self.sent, self._channel, self._frames = 0, channel, frames
        self.thread = threading.Thread(target=self._send, daemon=True)
        self.thread.start()
        before = -1
        while self.thread.is_alive() and before < self.sent:
            before = self.sent
            self.thread.join(0.4)

    def _send(self):
        until = time.monotonic() + 1
        with contextlib.suppress(ChannelError, OSError):
            for kind, *buffers in self._frames:
                self._channel.send(kind, *buffers)
                self.sent += 1
                if time.monotonic() > until:
                    return


def floods(kind):
    """An endless sequence of an attacker's frames."""
    read = READ_HEAD.pack(1, 0, 64 << 10)
    for k in itertools.count():
        if kind == "reads":
            yield Kind.READ, read
        elif kind == "stats":
            yield (Kind.STATS,)
        elif kind == "pins":
            yield Kind.PIN, pack_json({"do": "list"})
        elif kind == "offers":
            yield Kind.OFFER, CONTENT.pack(1, 1 << 20, 0, bytes(32))
        elif kind == "small definitions":
            yield Kind.DEFINE, additions(4, 4 * k)
        elif kind == "sources":
            yield Kind.SOURCE, encode_source(Source("ttir", f"{k} " + "é" * (500 << 10)))
        elif kind == "lost writes":
            yield Kind.WRITE, WRITE_HEAD.pack(99, 0), bytes(4 << 20)


@pytest.mark.parametrize(
    "kind",
    [
        *("reads", "pins", "small definitions"),
        *[pytest.param(kind, marks=pytest.mark.slow) for kind in ("stats", "offers", "sources", "lost writes")],
    ],
)
def test_flood_without_reading_is_bounded(cluster, alice, bob, kind):
    victim, attacker = session_with_buffer(alice), session_with_buffer(bob)
    before = resident(cluster)
    sending = Flood(attacker, floods(kind)).thread
    assert answers_correctly(victim)
    assert resident(cluster) - before < 200 << 20
    attacker.abort()
    sending.join(20)
    attacker.close()
    assert answers_correctly(victim)
    victim.close()


@pytest.mark.parametrize("name", ["", "x" * 129, "a\r\nNats-Rollup: all", "\ud800"])
def test_pin_with_malformed_name_is_refused(cluster, alice, bob, name):
    victim = session_with_buffer(alice)
    attacker, _ = enter(bob.open(dedup="tenant"))
    raw, data = allocates(4096), os.urandom(4096)

    def answer(kind, payload=b""):
        attacker.send(kind, payload)
        return json.loads(bytes(attacker.recv(20).payload))

    attacker.send(Kind.DEFINE, raw)
    attacker.send(Kind.RUN, pack_run(digest(raw), [1], b"", []))
    content = CONTENT.pack(1, len(data), 0, content_id([chunk_digest(data)], len(data)))
    assert not answer(Kind.OFFER, content)["known"]
    attacker.send(Kind.WRITE, WRITE_HEAD.pack(1, 0), data)
    attacker.send(Kind.SEAL, content)
    cluster.wait(lambda: not answer(Kind.STATS)["sealing"])
    assert "not a valid name for weights" in answer(Kind.PIN, pack_json({"do": "add", "name": name}))["error"]
    assert answer(Kind.PIN, pack_json({"do": "add", "name": "weights"})) == {"bytes": 4096}
    assert answers_correctly(victim)
    assert answer(Kind.PIN, pack_json({"do": "remove", "name": "weights"})) == {"removed": True}
    attacker.close()
    victim.close()


def test_maximal_definition_does_not_delay_others(cluster, alice, bob):
    victim, attacker = session_with_buffer(alice), session_with_buffer(bob)
    before = resident(cluster)
    attacker.send(Kind.DEFINE, additions(6000, 1_000_000))
    attacker.send(Kind.SYNC)
    times = []
    for _ in range(20):
        begun = time.monotonic()
        assert answers_correctly(victim)
        times.append(time.monotonic() - begun)
    assert max(times) < 2.0  # in the device thread it would take seconds
    assert attacker.recv(60).kind == Kind.RESULT
    assert resident(cluster) - before < 200 << 20
    victim.close()
    attacker.close()


def test_definitions_beyond_the_limits_are_refused(cluster, bob):
    attacker = session_with_buffer(bob)
    raw = bytearray(allocates(8))
    for what in (bytes(raw) + bytes(8 << 20), raw[:4] + struct.pack("<II", 1 << 20, 0) + bytes(4 << 20)):
        attacker.send(Kind.DEFINE, bytes(what))
        attacker.send(Kind.SYNC)
        assert attacker.recv(20).kind == Kind.ERROR
    assert answers_correctly(attacker)
    attacker.close()


# -- collectives ---------------------------------------------------------------------------------------------------------


def part(rank, **how):
    """A rank's part in the first all_reduce of a group of two."""
    one = (Range(1, 0, 1),)
    call = {
        "group": b"known to the foe",
        "sequence": 1,
        "rank": rank,
        "size": 2,
        "timeout_ms": 60_000,
        "dtype": DType.F32,
    }
    call |= {"what": What.ALL_REDUCE, "reads": one, "writes": one, "reduction": Reduction.SUM}
    return pack_collective(Collective(**{**call, **how}))


def test_attacker_who_knows_a_groups_id_is_not_its_rank(alice, bob):
    ranks, attacker = [session_with_buffer(alice) for _ in range(2)], session_with_buffer(bob)
    ranks[0].send(Kind.COLLECTIVE, part(0))
    attacker.send(Kind.COLLECTIVE, part(1, timeout_ms=50))
    attacker.send(Kind.SYNC)
    error = json.loads(bytes(attacker.recv(60).payload))
    assert error["code"] == "executor.collective" and "rank 0 did not come" in error["message"]
    ranks[1].send(Kind.COLLECTIVE, part(1))
    for rank in ranks:
        rank.send(Kind.SYNC)
        assert rank.recv(60).kind == Kind.RESULT
    for channel in (*ranks, attacker):
        channel.close()


def test_malformed_collectives_fail_their_session_only(alice, bob):
    victim, attacker = session_with_buffer(alice), session_with_buffer(bob)
    whole = part(0)
    frames = [whole[:cut] for cut in range(0, len(whole), 7)]
    frames += [
        part(0, size=1 << 31),
        part(7),
        part(0, sequence=1 << 63),
        part(0, reads=(Range(1, (1 << 64) - 4, 1),) * 2),
    ]
    frames += [
        part(
            0,
            size=1,
            timeout_ms=1,
            reads=(Range(1, (1 << 64) - 4, (1 << 64) - 1),),
            writes=(Range(1, 0, (1 << 64) - 1),),
        )
    ]
    for raw in frames:
        attacker.send(Kind.COLLECTIVE, raw)
        attacker.send(Kind.SYNC)
        assert attacker.recv(60).kind == Kind.ERROR
    attacker.send(Kind.SYNC)
    assert attacker.recv(60).kind == Kind.RESULT and answers_correctly(victim)
    victim.close()
    attacker.close()
