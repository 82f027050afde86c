"""Collectives of sessions on one executor: results, waiting, differences between the ranks, and hostile frames."""

import dataclasses
import itertools
import struct
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from wooly_bus.channel import ChannelClosedError
from wooly_executor.collectives import groups as pure
from wooly_executor.collectives import service
from wooly_executor.collectives.groups import Groups
from wooly_executor.collectives.work import Part, WorkJob, steps
from wooly_executor.errors import CollectiveError
from wooly_executor.memory.book import Scope
from wooly_executor.memory.swap import Policy
from wooly_executor.mover import SaveJob
from wooly_executor.runtime.buffers import TORCH_DTYPE
from wooly_executor.vram import SwapSettings
from wooly_testkit.effort import examples
from wooly_wis.collectives import REDUCIBLE, Collective, Range, Reduction, What, pack_collective, unpack_collective
from wooly_wis.dtypes import DType
from wooly_wis.errors import DecodeError
from wooly_wis.frames import Kind

from services.executor.tests.conftest import WAIT_S, Body
from services.executor.tests.fake_gpu import FakeDriver, gpu_runtime

GROUP = b"sixteen bytes id"
ONE = Range(1, 0, 1)


class Ranks:
    """Sessions that are the ranks of one group."""

    def __init__(self, device, size, *, group=GROUP, timeout_ms=60_000, tenant="", names=""):
        names = names or [f"rank{k}" for k in range(size)]
        self.clients = [device.open(name, tenant=tenant) for name in names]
        self.size, self.group, self.timeout_ms, self.sequence = size, group, timeout_ms, 0

    def send(self, rank, what, *, sequence=None, **how):
        single = what in (What.EXCHANGE, What.LEAVE)
        number = 0 if single else self.sequence if sequence is None else sequence
        common = {
            "group": self.group,
            "sequence": number,
            "rank": rank,
            "size": self.size,
            "timeout_ms": self.timeout_ms,
        }
        self.clients[rank].collective(what, **{"dtype": DType.F32, "origin": f"train.py:{rank + 1}", **common, **how})

    def all(self, what, how, **same):
        """Each rank sends its part; `how` gets the rank."""
        self.sequence += what is not What.EXCHANGE
        for rank in range(self.size):
            self.send(rank, what, **same, **how(rank))


def all_reduce(ranks, count, *, reads=1, writes=1, reduction=Reduction.SUM, **more):
    ranks.all(
        What.ALL_REDUCE,
        lambda rank: {"reads": [(reads, 0, count)], "writes": [(writes, 0, count)]},
        reduction=reduction,
        **more,
    )


def errors_of(wis, clients):
    found = []
    for client in clients:
        with pytest.raises(wis.error) as caught:
            client.sync()
        assert caught.value.code == "executor.collective"
        found.append(caught.value.message)
    return found


# -- results -------------------------------------------------------------------------------------------------------------


def test_ranks_that_reduce_get_the_sum_in_the_order_of_the_ranks(device):
    ranks = Ranks(device, 3)
    values = [(1e8, 1.0), (-1e8, 2.0), (1.0, 3.0)]
    for rank, client in enumerate(ranks.clients):
        client.make(1, *values[rank])
    all_reduce(ranks, 2)
    assert [client.floats(1, 2) for client in ranks.clients] == [[1.0, 6.0]] * 3  # the last 1.0 is added last


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (Reduction.SUM, [6.0, -6.0]),
        (Reduction.AVG, [3.0, -3.0]),
        (Reduction.PRODUCT, [8.0, 8.0]),
        (Reduction.MIN, [2.0, -4.0]),
        (Reduction.MAX, [4.0, -2.0]),
        (Reduction.PREMUL_SUM, [3.0, -3.0]),
    ],
)
def test_each_reduction_has_its_result(device, reduction, expected):
    ranks = Ranks(device, 2)
    for rank, client in enumerate(ranks.clients):
        client.make(1, 2.0 + 2 * rank, -2.0 - 2 * rank)
    all_reduce(ranks, 2, reduction=reduction, factor=0.5 if reduction is Reduction.PREMUL_SUM else 1.0)
    assert [client.floats(1, 2) for client in ranks.clients] == [expected] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.uint8])
@pytest.mark.parametrize("count", [1, 1000])
def test_pieces_of_any_size_have_the_bits_of_additions_one_after_the_other(dtype, count):
    generator = torch.Generator().manual_seed(1)
    sources = [(torch.rand(count, generator=generator) * 100).to(dtype) for _ in range(4)]
    expected = ((sources[0] + sources[1]) + sources[2]) + sources[3]
    call = Collective(GROUP, 1, 0, 4, 1000, What.ALL_REDUCE, reduction=Reduction.SUM)
    targets = [torch.empty(count, dtype=dtype) for _ in range(4)]
    done = sum(steps([Part(tuple(sources), tuple(targets))], call, 64))
    assert done == 8 * count * dtype.itemsize
    assert all(torch.equal(target, expected) for target in targets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
@pytest.mark.parametrize("reduction", [*Reduction][1:], ids=lambda r: r.name)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_reduction_in_place_has_the_bits_of_one_with_memory_of_its_own(dtype, reduction, size):
    generator = torch.Generator().manual_seed(1)
    values = [torch.randint(-90, 90, (40,), generator=generator).to(dtype) for _ in range(size)]
    if reduction is Reduction.PREMUL_SUM and not dtype.is_floating_point:
        return  # the frame is refused
    call = Collective(GROUP, 1, 0, size, 1000, What.ALL_REDUCE, reduction=reduction)
    call = dataclasses.replace(call, factor=0.3 if reduction is Reduction.PREMUL_SUM else 1.0)
    expected = torch.empty(40, dtype=dtype)
    list(steps([Part(tuple(values), (expected,))], call, 64))
    for count in range(1, size + 1):
        for writers in itertools.permutations(range(size), count):
            sources = [v.clone() for v in values]
            list(steps([Part(tuple(sources), tuple([sources[rank] for rank in writers]))], call, 64))
            found = [expected if rank in writers else values[rank] for rank in range(size)]
            assert all(map(torch.equal, sources, found)), writers


@pytest.mark.parametrize("dtype", sorted(REDUCIBLE, key=lambda d: d.code), ids=lambda d: d.label)
def test_each_reducible_dtype_has_all_its_reductions(dtype):
    for reduction in Reduction:
        call = Collective(GROUP, 1, 0, 2, 1000, What.ALL_REDUCE, dtype, (ONE,), (ONE,), reduction)
        try:
            call = unpack_collective(pack_collective(call))
        except DecodeError:
            continue
        out = torch.empty(1, dtype=TORCH_DTYPE[dtype])
        list(steps([Part((torch.ones_like(out), torch.ones_like(out)), (out,))], call, 64))
        doubled = reduction in (Reduction.SUM, Reduction.PREMUL_SUM) and dtype is not DType.BOOL
        assert out.item() == (2 if doubled else 1), reduction


def test_unexpected_error_of_the_work_fails_the_ranks_and_not_the_executor(device, wis, monkeypatch):
    def broken(*args):
        raise RuntimeError("the library fails")
        yield 0

    ranks = pair(device, 1.0)
    monkeypatch.setattr(service, "steps", broken)
    all_reduce(ranks, 1)
    assert all("the library fails" in why for why in errors_of(wis, ranks.clients))
    monkeypatch.undo()
    all_reduce(ranks, 1, reads=2, writes=2)
    assert contents(ranks, 2, 1) == [[0.0]] * 2


def test_average_of_integers_is_truncated_and_sum_of_bools_is_or():
    call = Collective(GROUP, 1, 0, 2, 1000, What.ALL_REDUCE, reduction=Reduction.AVG)
    out = torch.empty(2, dtype=torch.int32)
    list(steps([Part((torch.tensor([3, -3]).int(), torch.tensor([4, -4]).int()), (out,))], call, 64))
    assert out.tolist() == [3, -3]
    call, out = dataclasses.replace(call, reduction=Reduction.SUM), torch.empty(3, dtype=torch.bool)
    list(steps([Part((torch.tensor([True, True, False]), torch.tensor([True, False, False])), (out,))], call, 64))
    assert out.tolist() == [True, True, False]


def test_large_collective_is_done_in_pieces_and_billed_to_all_ranks(device):
    ranks, count = Ranks(device, 2), 1 << 20
    for rank, client in enumerate(ranks.clients):
        client.load(1, struct.pack("<f", rank + 1.0) * count)
    before = device.call(lambda: [s.used.gpu_ns for s in device.loop.sessions.all()])
    all_reduce(ranks, count)
    for client in ranks.clients:
        assert client.read(1, 4 * count) == struct.pack("<f", 3.0) * count
    used = device.call(lambda: [s.used.gpu_ns for s in device.loop.sessions.all()])
    shares = [now - then for now, then in zip(used, before, strict=True)]
    assert shares[0] == shares[1] > 0
    device.check()


@pytest.mark.parametrize("count", [4, 1 << 18])
def test_collective_on_a_gpu_waits_for_work_in_flight(make_device, wis, count):
    device = make_device(runtime=gpu_runtime(FakeDriver()))
    ranks, v = Ranks(device, 2), wis.at(DType.F32, count)
    for client in ranks.clients:
        client.run(wis.body().alloc("x", 4 * count).fill("x", v, 1.0), {"x": 1})
        for _ in range(20):  # known programs may be in flight
            client.run(wis.body().call("aten.add_.Tensor", ("inout", "x", v), args=(wis.ref(0), wis.ref(0))), {"x": 1})
    all_reduce(ranks, count)
    for client in ranks.clients:
        client.run(wis.body().call("aten.add_.Tensor", ("inout", "x", v), args=(wis.ref(0), wis.ref(0))), {"x": 1})
        assert client.read(1, 4 * count) == struct.pack("<f", 2.0**22) * count


def pair(device, *values):
    ranks = Ranks(device, 2)
    for rank, client in enumerate(ranks.clients):
        client.make(1, *[v + 100 * rank for v in values])
        client.make(2, *[0.0] * 2 * len(values))
    return ranks


def contents(ranks, buffer, n):
    return [client.floats(buffer, n) for client in ranks.clients]


def test_broadcast_copies_the_roots_elements(device):
    ranks = pair(device, 1.0, 2.0)
    ranks.all(What.BROADCAST, lambda rank: {("reads", "writes")[rank == 0]: [(1, 0, 2)]}, root=1)
    assert contents(ranks, 1, 2) == [[101.0, 102.0]] * 2


def test_all_gather_and_its_in_place_form_have_all_parts_in_order(device):
    ranks = pair(device, 1.0, 2.0)
    ranks.all(What.ALL_GATHER, lambda rank: {"reads": [(1, 0, 2)], "writes": [(2, 0, 2), (2, 8, 2)]})
    assert contents(ranks, 2, 4) == [[1.0, 2.0, 101.0, 102.0]] * 2
    ranks.all(What.ALL_GATHER, lambda rank: {"reads": [(1, 4 * rank, 1)], "writes": [(1, 0, 1), (1, 4, 1)]})
    assert contents(ranks, 1, 2) == [[1.0, 102.0]] * 2


def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(device):
    ranks = pair(device, 1.0, 2.0)
    ranks.all(
        What.REDUCE_SCATTER,
        lambda rank: {"reads": [(1, 0, 1), (1, 4, 1)], "writes": [(2, 0, 1)]},
        reduction=Reduction.SUM,
    )
    assert contents(ranks, 2, 1) == [[102.0], [104.0]]


def test_all_to_all_with_unequal_parts_exchanges_them(device):
    ranks = pair(device, 1.0, 2.0, 3.0)
    parts = {0: ([(1, 0, 1), (1, 4, 2)], [(2, 0, 1), (2, 4, 1)]), 1: ([(1, 0, 1), (1, 4, 2)], [(2, 0, 2), (2, 8, 2)])}
    ranks.all(What.ALL_TO_ALL, lambda rank: dict(zip(("reads", "writes"), parts[rank], strict=True)))
    assert contents(ranks, 2, 4) == [[1.0, 101.0, 0.0, 0.0], [2.0, 3.0, 102.0, 103.0]]


def test_gather_scatter_and_reduce_have_the_root_they_name(device):
    ranks = pair(device, 1.0, 2.0)
    ranks.all(
        What.GATHER, lambda rank: {"reads": [(1, 0, 1)], "writes": [(2, 0, 1), (2, 4, 1)] if rank else []}, root=1
    )
    assert contents(ranks, 2, 2) == [[0.0, 0.0], [1.0, 101.0]]
    ranks.all(
        What.SCATTER, lambda rank: {"reads": [] if rank else [(1, 0, 1), (1, 4, 1)], "writes": [(2, 8, 1)]}, root=0
    )
    assert contents(ranks, 2, 3) == [[0.0, 0.0, 1.0], [1.0, 101.0, 2.0]]
    ranks.all(
        What.REDUCE,
        lambda rank: {"reads": [(1, 0, 2)], "writes": [] if rank else [(1, 0, 2)]},
        root=0,
        reduction=Reduction.SUM,
    )
    assert contents(ranks, 1, 2) == [[102.0, 104.0], [101.0, 102.0]]


def test_exchanges_in_both_directions_at_once_do_not_wait_for_each_other(device):
    ranks = Ranks(device, 3)
    for rank, client in enumerate(ranks.clients):
        client.make(1, rank + 1.0)
        client.make(2, 0.0)
    ranks.all(
        What.EXCHANGE,
        lambda rank: {"reads": [(1, 0, 1, (rank + 1) % 3)], "writes": [(2, 0, 1, (rank - 1) % 3)]},
    )
    assert contents(ranks, 2, 1) == [[3.0], [1.0], [2.0]]


def test_large_exchanges_of_one_rank_are_done_one_after_the_other(device):
    ranks, count = Ranks(device, 3), 1 << 18
    for rank, client in enumerate(ranks.clients):
        client.load(1, struct.pack("<f", rank + 1.0) * count)
        client.load(2, bytes(8 * count))
    to = {rank: [other for other in range(3) if other != rank] for rank in range(3)}
    ranks.all(
        What.EXCHANGE,
        lambda rank: {
            "reads": [(1, 0, count, other) for other in to[rank]],
            "writes": [(2, 4 * count * k, count, other) for k, other in enumerate(to[rank])],
        },
    )
    for rank, client in enumerate(ranks.clients):
        expected = b"".join(struct.pack("<f", other + 1.0) * count for other in to[rank])
        assert client.read(2, 8 * count) == expected


def test_send_waits_for_its_receive_and_order_between_a_pair_is_kept(device):
    ranks = pair(device, 1.0, 2.0)
    for k in range(2):
        ranks.send(0, What.EXCHANGE, reads=[(1, 4 * k, 1, 1)])
    ranks.send(1, What.EXCHANGE, writes=[(2, 0, 1, 0)])
    ranks.send(1, What.EXCHANGE, writes=[(2, 4, 1, 0)])
    assert ranks.clients[1].floats(2, 2) == [1.0, 2.0]


# -- waiting -------------------------------------------------------------------------------------------------------------


def parked(device, session_id):
    return device.call(lambda: device.loop.sessions[session_id].flow.aside is not None)


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_parked(device, session_id):
    wait_until(lambda: parked(device, session_id))


def test_waiting_rank_holds_no_device_and_others_run(device, wis):
    ranks, other = pair(device, 1.0), device.open("other")
    ranks.sequence = 1
    ranks.send(0, What.ALL_REDUCE, reduction=Reduction.SUM, reads=[(1, 0, 1)], writes=[(1, 0, 1)])
    wait_parked(device, "rank0")
    other.make(1, 5.0)
    assert other.floats(1, 1) == [5.0]
    ranks.send(1, What.ALL_REDUCE, reduction=Reduction.SUM, reads=[(1, 0, 1)], writes=[(1, 0, 1)])
    assert contents(ranks, 1, 1) == [[102.0]] * 2


@pytest.fixture
def travelling(device):
    """Two ranks, of which rank 0 waits in an all_reduce of its buffer 1."""
    ranks = pair(device, 1.0)
    ranks.all(What.BARRIER, lambda rank: {})
    for client in ranks.clients:
        client.sync()
    ranks.sequence += 1
    ranks.send(0, What.ALL_REDUCE, **REDUCED)
    wait_parked(device, "rank0")
    return ranks


REDUCED = {"reduction": Reduction.SUM, "reads": [(1, 0, 1)], "writes": [(1, 0, 1)]}


def test_runs_that_do_not_use_the_buffers_go_on_while_a_collective_waits(device, wis, travelling):
    client = travelling.clients[0]
    for number in range(3, 6):
        assert client.run(wis.body().alloc("x", 64), {"x": number}, reply=True)["outputs"] == []
    assert parked(device, "rank0") and device.held()["rank0"][1] == 5
    travelling.send(1, What.ALL_REDUCE, **REDUCED)
    assert contents(travelling, 1, 1) == [[102.0]] * 2


@pytest.mark.parametrize("frees", [False, True])
def test_runs_that_use_or_free_a_buffer_wait_for_its_collective(device, wis, travelling, frees):
    client = travelling.clients[0]
    if frees:
        client.run(wis.body().alloc("x", 64), {"x": 3}, frees=[1])
    else:
        one = wis.at(DType.F32, 1)
        client.run(wis.body().copy("x", one, "y", one), {"x": 1, "y": 2})
    client.channel.send(Kind.SYNC)
    wait_until(lambda: device.call(lambda: device.loop.sessions["rank0"].flow.readiness.name) == "PEERS")
    travelling.send(1, What.ALL_REDUCE, **REDUCED)
    client.answer()
    if frees:
        assert device.call(lambda: 1 not in device.loop.sessions["rank0"].buffers)
    else:
        assert client.floats(2, 1) == [102.0]
    assert travelling.clients[1].floats(1, 1) == [102.0]


def test_collective_that_fails_poisons_its_results_and_spares_the_runs_behind_it(device, wis, travelling):
    client = travelling.clients[0]
    client.run(wis.body().alloc("x", 4), {"x": 3}, reply=True)
    travelling.clients[1].channel.close()
    assert "rank 1 has ended" in errors_of(wis, [client])[0]
    client.write(3, struct.pack("<f", 7.0))
    assert client.floats(3, 1) == [7.0]
    with pytest.raises(wis.error, match="rank 1 has ended"):
        client.floats(1, 1)


def test_frames_are_acknowledged_only_when_all_before_them_are_processed(device, wis, travelling):
    """A client takes an acknowledgement for the end of all work so far."""
    client = travelling.clients[0]
    client.run(wis.body().alloc("x", 64), {"x": 3}, reply=True)
    client.channel.poll_acks()
    assert client.channel.acked < client.channel._sent - 2  # the collective, the program and the run
    travelling.send(1, What.ALL_REDUCE, **REDUCED)
    wait_until(lambda: not parked(device, "rank0"))

    def all_acknowledged():
        client.channel.poll_acks()
        return client.channel.acked == client.channel._sent

    wait_until(all_acknowledged)


def test_session_counts_as_idle_since_its_collective_waits_unless_it_runs_programs(device, wis, travelling):
    def idle():
        session = device.loop.sessions["rank0"]
        return device.call(lambda: (session.flow.parked, device.loop.vram._residents.idle_since(session)))

    parked, since = idle()
    assert parked and since is not None
    client = travelling.clients[0]
    client.run(wis.body().alloc("x", 64), {"x": 3}, reply=True)
    assert idle() == (True, since)
    session = device.loop.sessions["rank0"]
    frame = device.call(lambda: session.flow.aside)
    device.call(lambda: session.flow.inbox.frames.append(dataclasses.replace(frame, kind=int(Kind.RUN))))
    assert idle() == (False, None)
    device.call(session.flow.inbox.frames.clear)
    travelling.send(1, What.ALL_REDUCE, **REDUCED)
    assert contents(travelling, 1, 1) == [[102.0]] * 2


def test_session_that_ends_while_its_collective_waits_leaves_nothing(device, wis, travelling):
    client = travelling.clients[0]
    client.run(wis.body().alloc("x", 64), {"x": 3}, reply=True)
    client.channel.close()
    device.wait_closed("rank0")
    assert device.held().keys() == {"rank1"}
    device.check()
    travelling.send(1, What.ALL_REDUCE, **REDUCED)
    assert "rank 0 has ended" in errors_of(wis, travelling.clients[1:])[0]


@pytest.mark.parametrize("clean", [True, False])
def test_rank_that_ends_ends_the_waiting_of_the_others_with_its_reason(device, wis, clean):
    ranks = Ranks(device, 3)
    for client in ranks.clients:
        client.make(1, 1.0)
    all_reduce(ranks, 1)
    assert contents(ranks, 1, 1) == [[3.0]] * 3
    ranks.sequence += 1
    for rank in (0, 1):
        ranks.send(rank, What.ALL_REDUCE, reduction=Reduction.SUM, reads=[(1, 0, 1)], writes=[(1, 0, 1)])
    wait_parked(device, "rank0")
    if clean:
        ranks.clients[2].close()
    else:
        ranks.clients[2].channel.close()
    for why in errors_of(wis, ranks.clients[:2]):
        assert "rank 2 has" in why and "all_reduce (number 2 of the group) at train.py:1" in why
    ranks.sequence += 1
    ranks.send(0, What.BARRIER)
    assert "rank 2 has" in errors_of(wis, ranks.clients[:1])[0]


@pytest.mark.parametrize("waits", [True, False])
def test_rank_that_loses_its_client_ends_the_sessions_of_ranks_that_can_go_on_elsewhere(device, wis, waits):
    """They get no error: their clients see a loss. A rank that cannot go on gets the error."""
    ranks = Ranks(device, 3)
    for client in ranks.clients:
        client.make(1, 1.0)
    all_reduce(ranks, 1, recovers=True)
    assert contents(ranks, 1, 1) == [[3.0]] * 3
    ranks.sequence += 1
    if waits:
        ranks.send(0, What.BARRIER, recovers=True)
        wait_parked(device, "rank0")
    ranks.clients[2].channel.close()
    device.wait_closed("rank2")
    if not waits:
        ranks.send(0, What.BARRIER, recovers=True)
    with pytest.raises(ChannelClosedError, match="rank 2 has ended") as caught:
        ranks.clients[0].sync()
    assert caught.value.passing
    ranks.send(1, What.BARRIER)
    assert "rank 2 has ended" in errors_of(wis, ranks.clients[1:2])[0]


def test_rank_that_closes_its_session_is_an_error_for_ranks_that_can_go_on_elsewhere(device, wis):
    ranks = Ranks(device, 2)
    ranks.sequence = 1
    ranks.all(What.BARRIER, lambda rank: {}, recovers=True, sequence=1)
    ranks.clients[1].channel.send(Kind.CLOSE)
    device.wait_closed("rank1")
    ranks.send(0, What.BARRIER, recovers=True, sequence=2)
    assert "rank 1 has closed its session" in errors_of(wis, ranks.clients[:1])[0]


def test_first_frame_of_ranks_that_go_on_here_tells_the_number(device, wis):
    ranks = Ranks(device, 2)
    ranks.sequence = 41
    for client in ranks.clients:
        client.make(1, 1.0)
    all_reduce(ranks, 1, recovers=True)
    assert contents(ranks, 1, 1) == [[2.0]] * 2
    ranks.send(0, What.BARRIER, recovers=True, sequence=7)
    refused(wis, ranks.clients[0], "sends number 7 .* next one has number 43")
    for rank in (0, 1):
        ranks.send(rank, What.LEAVE, group=bytes(16), recovers=True)  # the group ended before the checkpoint
        assert ranks.clients[rank].sync() == {}
    ranks.send(0, What.LEAVE, group=bytes(16))
    refused(wis, ranks.clients[0], "does not exist")


def test_rank_that_does_not_come_ends_the_waiting_at_the_timeout(device, wis):
    ranks = Ranks(device, 3, timeout_ms=50)
    ranks.sequence = 1
    for rank in (0, 2):
        ranks.send(rank, What.BARRIER)
    for why in errors_of(wis, (ranks.clients[0], ranks.clients[2])):
        assert "rank 1 did not come to barrier" in why and "within 0.05 s" in why and "ranks 0, 2 waited" in why
    ranks.send(1, What.BARRIER)
    assert "rank 1 did not come" in errors_of(wis, [ranks.clients[1]])[0]


def test_waiting_rank_is_swapped_out_and_returns_for_the_work(make_device, wis):
    swap = SwapSettings(host=1 << 24, policy=Policy(reserve=0, idle_ns=1_000_000))
    device = make_device(memory=4 << 20, swap=swap)
    ranks, count = Ranks(device, 2), 1 << 18
    for rank, client in enumerate(ranks.clients):
        client.load(1, struct.pack("<f", rank + 1.0) * count)
    ranks.sequence = 1
    part = {"reduction": Reduction.SUM, "reads": [(1, 0, count)], "writes": [(1, 0, count)]}
    ranks.send(0, What.ALL_REDUCE, **part)
    wait_parked(device, "rank0")
    other = device.open("other")
    other.run(wis.body().alloc("x", 3 << 20), {"x": 1})
    other.sync()
    assert "away" in device.residence().values()
    other.close()
    device.wait_closed("other")
    ranks.send(1, What.ALL_REDUCE, **part)
    for client in ranks.clients:
        assert client.read(1, 4 * count) == struct.pack("<f", 3.0) * count
    device.check()


def test_ranks_that_never_fit_on_the_device_together_get_an_error(make_device, wis):
    swap = SwapSettings(host=1 << 24, policy=Policy(reserve=0, idle_ns=1_000_000))
    device = make_device(memory=4 << 20, swap=swap)
    ranks, count = Ranks(device, 2), 3 << 18
    part = {"reduction": Reduction.SUM, "reads": [(1, 0, count)], "writes": [(1, 0, count)]}
    ranks.sequence = 1
    for rank, client in enumerate(ranks.clients):
        client.load(1, bytes(4 * count))
        ranks.send(rank, What.ALL_REDUCE, **part)
    assert all("hold 6291456 bytes together" in why for why in errors_of(wis, ranks.clients))
    device.check()


def test_suspended_rank_makes_the_others_wait_until_it_goes_on(device, wis):
    ranks = pair(device, 1.0)
    device.call(lambda: device.loop.sessions.suspend("rank1", True, None))
    all_reduce(ranks, 1)
    wait_parked(device, "rank0")
    device.call(lambda: device.loop.sessions.suspend("rank1", False, None))
    assert contents(ranks, 1, 1) == [[102.0]] * 2


def test_memory_of_a_session_that_ends_stays_on_its_account_until_no_job_uses_it(make_device, monkeypatch):
    """A swap-out is cancelled by a collective, and has not ended when the session ends in the middle of the collective."""
    device = make_device(memory=40 << 20, swap=SwapSettings(Policy(0, 1 << 20, 0), 1 << 30))
    vram, submit, steps = device.loop.vram, device.loop.vram.mover.submit, SaveJob.steps
    saving, go_on, collective_may_end, ended = [threading.Event() for _ in range(4)]

    def slow(job):
        saving.set()
        go_on.wait(WAIT_S)
        yield from steps(job)

    def watched(job):
        if isinstance(job, WorkJob):
            done = job.done
            job.done = lambda *outcome: (collective_may_end.wait(WAIT_S), done(*outcome))
        elif isinstance(job, SaveJob):
            done = job.done
            job.done = lambda *outcome: (done(*outcome), ended.set())
        submit(job)

    monkeypatch.setattr(SaveJob, "steps", slow)
    monkeypatch.setattr(vram.mover, "submit", watched)
    count = 1 << 21
    ranks = [device.open(f"rank{k}", tenant="t", swappable=k == 0) for k in range(2)]
    for client in ranks:
        client.run(Body().alloc("x", 4 * count), [1])
        client.sync()
    other = device.open("other")
    other.run(Body().alloc("x", 26 << 20), [1])
    try:
        assert saving.wait(WAIT_S)
        for rank, client in enumerate(ranks):
            both = [(1, 0, count)]
            common = {"group": bytes(16), "sequence": 1, "rank": rank, "size": 2, "timeout_ms": 60_000}
            client.collective(
                What.ALL_REDUCE, dtype=DType.F32, reduction=Reduction.SUM, reads=both, writes=both, **common
            )
        until = time.monotonic() + WAIT_S
        while not device.call(lambda: any(a.meetings[0].running for a in device.loop.collectives.groups._unsettled())):
            assert time.monotonic() < until
        device.call(lambda: device.loop.sessions.close("rank0", "its client was killed"))
        go_on.set()
        assert ended.wait(WAIT_S)
        assert device.call(lambda: "rank0" in vram.ledger.accounts)
    finally:
        go_on.set()
        collective_may_end.set()
    until = time.monotonic() + WAIT_S
    while device.call(lambda: "rank0" in vram.ledger.accounts):
        assert time.monotonic() < until
    other.sync()
    device.check()


def test_results_in_shared_contents_do_not_reach_other_sessions(device):
    data = struct.pack("<f", 1.0) * 8192
    clients = [device.open(f"rank{k}", scope=Scope.SHARED) for k in range(3)]
    for client in clients:
        client.load(1, data)
        client.sealed()
    ranks = Ranks.__new__(Ranks)
    ranks.clients, ranks.size, ranks.group, ranks.timeout_ms, ranks.sequence = clients[:2], 2, GROUP, 60_000, 0
    all_reduce(ranks, 8192)
    assert [c.floats(1, 1) for c in clients] == [[2.0], [2.0], [1.0]]
    device.check()


def test_weights_equal_in_all_ranks_are_stored_once_while_ranks_train(device):
    """As in DDP: each rank loads the model, and the gradients of all ranks are summed."""
    weights = bytes(range(256)) * 4096
    free = device.call(lambda: device.loop.vram.ledger.pool.free_bytes)
    clients = [device.open(f"rank{k}", tenant="acme", scope=Scope.TENANT) for k in range(3)]
    for number, client in enumerate(clients):
        assert client.load(1, weights) == (number > 0)
        client.sealed()
        client.make(2, float(number))
    ranks = Ranks.__new__(Ranks)
    ranks.clients, ranks.size, ranks.group, ranks.timeout_ms, ranks.sequence = clients, 3, GROUP, 60_000, 0
    all_reduce(ranks, 1, reads=2, writes=2)
    assert [client.floats(2, 1) for client in clients] == [[3.0]] * 3
    used = free - device.call(lambda: device.loop.vram.ledger.pool.free_bytes)
    assert len(weights) <= used < 2 * len(weights)
    assert clients[2].read(1, len(weights)) == weights


# -- differences between the ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            {"what": What.BARRIER, "reduction": Reduction.NONE, "reads": [], "writes": []},
            "different collective: all_reduce and barrier",
        ),
        ({"reduction": Reduction.MAX}, "different reduction: sum and max"),
        ({"dtype": DType.I32}, "different dtype: f32 and i32"),
        ({"reads": [(1, 0, 1)], "writes": [(1, 0, 1)]}, "different sizes: 2 and 1 elements"),
    ],
)
def test_ranks_that_ask_for_different_things_get_an_error_that_names_both_lines(device, wis, change, error):
    ranks = pair(device, 1.0, 2.0)
    ranks.sequence = 1
    part = {"what": What.ALL_REDUCE, "reduction": Reduction.SUM, "reads": [(1, 0, 2)], "writes": [(1, 0, 2)]}
    ranks.send(0, **part)
    ranks.send(1, **{**part, **change})
    for why in errors_of(wis, ranks.clients):
        assert error in why and "Rank 0: all_reduce" in why and "train.py:1" in why and "train.py:2" in why


@pytest.mark.parametrize(
    ("operand", "error"),
    [
        ((9, 0, 2), "buffer 9 does not exist"),
        ((1, 4, 2), "out of bounds"),
        ((1, (1 << 64) - 1, 2), "out of bounds"),
        ((1, 1, 1), "not a multiple"),
    ],
)
def test_operand_that_cannot_be_used_fails_all_ranks_and_changes_no_byte(device, wis, operand, error):
    ranks = pair(device, 1.0, 2.0)
    ranks.sequence = 1
    count = operand[2]
    for rank in range(2):
        reads = [operand] if rank else [(1, 0, count)]
        ranks.send(rank, What.ALL_REDUCE, reduction=Reduction.SUM, reads=reads, writes=[(2, 0, count)])
    for why in errors_of(wis, ranks.clients):
        assert "rank 1, all_reduce at train.py:2" in why and error in why
    assert contents(ranks, 1, 2) == [[1.0, 2.0], [101.0, 102.0]]
    with pytest.raises(wis.error, match="rank 1"):  # a result that was not computed is not to be used
        ranks.clients[0].floats(2, 1)
    all_reduce(ranks, 2)  # the group goes on
    assert contents(ranks, 1, 2) == [[102.0, 104.0]] * 2


def test_poisoned_operand_of_one_rank_fails_all_with_its_cause(device, wis):
    ranks = pair(device, 1.0)
    one = wis.at(DType.F32, 1)
    ranks.clients[1].run(
        wis.body().call("aten.mm.out", ("in", "x", one), ("in", "x", one), ("out", "y", one)), {"x": 1, "y": 2}
    )
    with pytest.raises(wis.error):
        ranks.clients[1].sync()
    all_reduce(ranks, 1, reads=2, writes=2)
    assert all("rank 1, all_reduce" in why and "an operation failed" in why for why in errors_of(wis, ranks.clients))


@pytest.mark.parametrize(
    ("reads", "writes", "error"),
    [
        ([(1, 0, 1)], [(2, 0, 1), (2, 0, 1)], "ranges 0 and 1 that it writes overlap"),
        ([(2, 0, 1)], [(2, 4, 1), (2, 0, 1)], "range 0 that it reads overlaps range 1"),
        ([(2, 2, 1)], [(2, 0, 1), (2, 8, 1)], "not a multiple"),
    ],
)
def test_overlapping_operands_are_refused(device, wis, reads, writes, error):
    ranks = pair(device, 1.0, 2.0)
    ranks.sequence = 1
    ranks.send(0, What.ALL_GATHER, reads=reads, writes=writes)
    ranks.send(1, What.ALL_GATHER, reads=[(1, 0, 1)], writes=[(2, 0, 1), (2, 4, 1)])
    assert all(
        f"rank 0, all_gather at train.py:1: {error}" in why or error in why for why in errors_of(wis, ranks.clients)
    )


@given(data=st.data(), size=st.sampled_from([1, 2, 3]))
def test_overlaps_are_those_of_the_bytes(data, size):
    def ranges(n):
        one = st.builds(lambda b, o, n: Range(b, 4 * o, n), st.integers(1, 2), st.integers(0, 6), st.integers(0, 3))
        return tuple(data.draw(st.lists(one, min_size=n, max_size=n)))

    call = Collective(GROUP, 1, 0, size, 1000, What.ALL_TO_ALL, DType.F32, ranges(size), ranges(size))
    written = [{(w.buffer, w.offset + k) for k in range(4 * w.elements)} for w in call.writes]
    read = [{(r.buffer, r.offset + k) for k in range(4 * r.elements)} for r in call.reads]
    expected = any(written[i] & written[j] for i in range(size) for j in range(i)) or any(
        r & w and not (i == j == 0 and r == w) for i, r in enumerate(read) for j, w in enumerate(written)
    )
    assert bool(service.overlap(call, call.reads, call.writes)) == expected


# -- hostile frames ------------------------------------------------------------------------------------------------------


def refused(wis, client, match):
    with pytest.raises(wis.error, match=match):
        client.sync()


def test_malformed_collective_fails_only_its_sender(device, wis):
    ranks = pair(device, 1.0)
    ranks.clients[0].channel.send(Kind.COLLECTIVE, b"\xff" * 77)
    refused(wis, ranks.clients[0], "COLLECTIVE frame")
    ranks.send(0, What.BARRIER, sequence=1, size=1 << 31)
    refused(wis, ranks.clients[0], "a group has 1 to 1024 ranks")
    all_reduce(ranks, 1)
    assert contents(ranks, 1, 1) == [[102.0]] * 2


def test_sequence_number_used_again_or_skipped_fails_only_its_sender(device, wis):
    ranks = pair(device, 1.0)
    all_reduce(ranks, 1)
    for number in (1, 3):
        ranks.send(0, What.BARRIER, sequence=number)
        refused(wis, ranks.clients[0], f"sends number {number} .* next one has number 2")
    all_reduce(ranks, 1)
    assert contents(ranks, 1, 1) == [[204.0]] * 2


def test_rank_of_another_session_cannot_be_taken(device, wis):
    ranks, stranger = pair(device, 1.0), device.open("stranger")
    all_reduce(ranks, 1)
    assert contents(ranks, 1, 1) == [[102.0]] * 2
    common = {"group": GROUP, "sequence": 2, "size": 2, "timeout_ms": 1000}
    stranger.collective(What.BARRIER, rank=1, **common)
    refused(wis, stranger, "another session is rank 1")
    stranger.collective(What.BARRIER, rank=1, **{**common, "size": 3})
    refused(wis, stranger, "the group has 2 ranks")
    ranks.clients[0].collective(What.BARRIER, rank=1, **common)
    refused(wis, ranks.clients[0], "another session is rank 1|is rank 0 of the group")
    all_reduce(ranks, 1)
    assert contents(ranks, 1, 1) == [[204.0]] * 2


def test_other_tenant_with_the_groups_id_meets_nobody(device, wis):
    ranks = Ranks(device, 2, tenant="a")
    stranger = device.open("stranger", tenant="b")
    for client in (*ranks.clients, stranger):
        client.make(1, 1.0)
    ranks.sequence = 1
    part = {"reduction": Reduction.SUM, "reads": [(1, 0, 1)], "writes": [(1, 0, 1)]}
    ranks.send(0, What.ALL_REDUCE, **part)
    stranger.collective(
        What.ALL_REDUCE, group=GROUP, sequence=1, rank=1, size=2, timeout_ms=20, dtype=DType.F32, **part
    )
    assert "rank 0 did not come" in errors_of(wis, [stranger])[0]
    ranks.send(1, What.ALL_REDUCE, **part)
    assert contents(ranks, 1, 1) == [[2.0]] * 2


def test_groups_of_a_tenant_are_limited(device, wis, monkeypatch):
    monkeypatch.setattr(pure, "GROUPS_OF_TENANT", 2)
    client = device.open("s", tenant="a")
    for k in range(3):
        client.collective(What.BARRIER, group=bytes([k]) * 16, sequence=1, rank=0, size=1, timeout_ms=1000)
    refused(wis, client, "2 groups on this device, which is the limit")
    client.collective(What.LEAVE, group=bytes(16), sequence=0, rank=0, size=1, timeout_ms=1000)
    client.collective(What.BARRIER, group=bytes([9]) * 16, sequence=1, rank=0, size=1, timeout_ms=1000)
    assert client.sync() == {}
    client.close()
    device.wait_closed("s")
    assert device.call(lambda: len(device.loop.collectives.groups)) == 0


# -- groups as a pure state machine --------------------------------------------------------------------------------------

SIZE = 3


class GroupsMachine(RuleBasedStateMachine):
    """Ranks come, leave and wait in any order. All that come get the same outcome, and nobody is forgotten."""

    def __init__(self):
        super().__init__()
        self.groups, self.now = Groups(), 0.0
        self.arrivals, self.next, self.closed = {}, dict.fromkeys(range(SIZE), 1), set()
        self.passed = set()
        self.running = []

    def free(self, rank):
        return rank not in self.arrivals and rank not in self.closed

    @rule(rank=st.integers(0, SIZE - 1), other=st.integers(0, 9), timeout=st.integers(1, 50))
    def meet(self, rank, other, timeout):
        if not self.free(rank):
            return
        what = What.BARRIER if other else What.ALL_REDUCE
        ranges = () if other else (Range(1, 0, 1),)
        call = Collective(
            *(GROUP, self.next[rank], rank, SIZE, timeout * 1000, what, DType.F32),
            *(ranges, ranges, Reduction.NONE if other else Reduction.SUM),
            recovers=rank > 0,
        )
        self.arrive(rank, call)

    @rule(rank=st.integers(0, SIZE - 1), by=st.integers(1, SIZE - 1), sends=st.booleans(), timeout=st.integers(1, 50))
    def exchange(self, rank, by, sends, timeout):
        if self.free(rank):
            r = (Range(1, 0, 1, (rank + by) % SIZE),)
            reads, writes = (r, ()) if sends else ((), r)
            self.arrive(rank, Collective(GROUP, 0, rank, SIZE, timeout * 1000, What.EXCHANGE, DType.F32, reads, writes))

    def arrive(self, rank, call):
        try:
            arrival = self.groups.arrive("t", f"s{rank}", call, self.now)
        except CollectiveError as e:
            assert "has ended" in str(e) or "next one has number" in str(e) or "does not exist" in str(e), e
            return
        if call.sequence:
            self.next[rank] += 1
        self.arrivals[rank] = arrival
        self.running += [m for m in arrival.meetings if m.complete and not m.done and m not in self.running]
        for meeting in self.running:
            meeting.running = True
        self.collect()

    @rule(error=st.sampled_from(["", "", "", "broken"]), which=st.integers(0, 5))
    def finish(self, error, which):
        if self.running:
            meeting = self.running.pop(which % len(self.running))
            settled = self.groups.finish(meeting, error)
            assert all(a.settled for a in settled)
            assert all(bool(a.error) or not meeting.error for a in meeting.arrivals)
            self.collect()

    @rule(rank=st.integers(0, SIZE - 1), passing=st.booleans())
    def close(self, rank, passing):
        if rank not in self.closed:
            self.closed.add(rank)
            self.passed |= {rank} if passing else set()
            self.groups.leave(f"s{rank}", "it died", passing=passing)
            self.arrivals.pop(rank, None)
            self.collect()

    @rule(seconds=st.integers(1, 60))
    def wait(self, seconds):
        self.now += seconds
        self.groups.expire(self.now)
        for arrival in self.arrivals.values():
            late = [m for m in arrival.meetings if not m.complete]
            assert (
                arrival.settled or not late or arrival.deadline > self.now or any(m.running for m in arrival.meetings)
            )
        self.collect()

    def collect(self):
        for rank, arrival in list(self.arrivals.items()):
            if arrival.settled:
                assert arrival.error or all(m.complete and m.done for m in arrival.meetings)
                assert not arrival.lost or (rank and self.passed and arrival.error)
                del self.arrivals[rank]

    @invariant()
    def tables_agree(self):
        self.groups.check()

    @invariant()
    def nobody_waits_for_a_dead_rank(self):
        for arrival in self.arrivals.values():
            for meeting in arrival.meetings:
                if not meeting.complete and not any(m.running for m in arrival.meetings):
                    waits_for = pure._others(meeting, arrival)
                    assert not waits_for & set(arrival.group.gone)


TestGroups = GroupsMachine.TestCase
TestGroups.settings = settings(
    max_examples=examples(60, 2000), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
