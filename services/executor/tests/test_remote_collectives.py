"""Collectives of ranks on two executors: the bits of one executor, and peers that die, are silent or hostile."""

import functools
import json
import socket
import threading

import pytest
import torch
from wooly_bus.channel import ChannelClosedError
from wooly_bus.channel.token import SignedPass, peer_ticket
from wooly_bus.keys import Key
from wooly_executor.collectives import peers, remote, service
from wooly_executor.collectives.peers import Introduction, Peer, PeerLink
from wooly_executor.errors import CollectiveError
from wooly_executor.host_account import HostLimits
from wooly_executor.memory.book import Scope
from wooly_executor.memory.swap import Policy
from wooly_executor.vram import SwapSettings
from wooly_wis.collectives import Collective, Reduction, What, share_of
from wooly_wis.dtypes import DType
from wooly_wis.frames import Kind, pack_json
from wooly_wis.messages import DirectSession

GROUP = b"sixteen bytes id"
WAIT_S = 30
TOKEN = "shared by standalone executors"


class Ranks:
    """Ranks are at the devices in turn. With one device, all are there.

    Args:
        devices: the devices.
        size: number of ranks.
        timeout_ms: timeout of the group.
        tell: the executors learn where the others are.
        least: the collectives are divided among all devices, into shares of at least this size, in bytes.
        opened: more arguments with which the sessions are opened.
    """

    def __init__(self, devices, size, *, timeout_ms=60_000, tell=True, least=None, **opened):
        self.size, self.timeout_ms, self.sequence = size, timeout_ms, 0
        self.devices = [devices[rank % len(devices)] for rank in range(size)]
        for device in devices:
            device.loop.admission.open_for_token(TOKEN)
        self.clients = [d.open(f"rank{rank}", tenant="default", **opened) for rank, d in enumerate(self.devices)]
        self.instances = [client.welcome["device"]["instance"] for client in self.clients[: len(devices)]]
        self.home = self.instances[0]
        for rank, client in enumerate(self.clients):
            for k in range(len(devices) if least else 1) if tell else ():
                if rank % len(devices) != k:
                    client.channel.send(Kind.GROUP, pack_json(self.introduction(rank, k)))
            if least:
                carriers = [other % len(devices) for other in range(size)]
                said = {"group": GROUP.hex(), "carriers": carriers, "least": least}
                client.channel.send(Kind.GROUP, pack_json(said))

    def introduction(self, rank, k=0, **changes):
        peer = {
            "executor_id": f"executor{k}" if k else "home",
            "endpoints": [str(self.devices[k].endpoint)],
            "session_id": f"rank{rank}+0",
            "token": TOKEN,
            "session": DirectSession().model_dump(mode="json"),
        } | changes
        return {"group": share_of(GROUP, k).hex(), "instance": self.instances[k], "peer": peer}

    def send(self, rank, what, **how):
        single = what in (What.EXCHANGE, What.LEAVE)
        common = {
            "group": GROUP,
            "sequence": 0 if single else self.sequence,
            "rank": rank,
            "size": self.size,
            "timeout_ms": self.timeout_ms,
            "origin": f"train.py:{rank + 1}",
        }
        self.clients[rank].collective(what, **{"dtype": DType.F32, **common, **how})

    def all(self, what, how, **same):
        self.sequence += what is not What.EXCHANGE
        for rank in range(self.size):
            self.send(rank, what, **same, **how(rank))


def values(rank, count=5):
    generator = torch.Generator().manual_seed(rank)
    return (torch.rand(count, generator=generator) * 10 ** (rank * 3)).tolist()


def run(ranks, what, how, outputs, **same):
    """Let each rank make its inputs (buffer 1) and outputs (buffer 2), and return the bytes of the outputs."""
    for rank, client in enumerate(ranks.clients):
        client.make(1, *values(rank))
        client.make(2, *[0.0] * outputs)
    ranks.all(what, how, **same)
    found = [client.read(2, 4 * outputs) for client in ranks.clients]
    for client in ranks.clients:
        client.run(client_frees(), [1, 2])
    return found


def client_frees():
    from services.executor.tests.conftest import Body

    return Body().free("x").free("y")


def everyone(ranks):
    n = ranks.size
    part = [(1, 4 * k, 1) for k in range(n)]
    into = [(2, 4 * k, 1) for k in range(n)]

    def rooted(rank, what):
        mine = rank == 1
        if what is What.BROADCAST:
            return {"reads": [(1, 0, 5)]} if mine else {"writes": [(2, 0, 5)]}
        if what is What.GATHER:
            return {"reads": [(1, 0, 1)], "writes": into if mine else []}
        if what is What.SCATTER:
            return {"reads": part if mine else [], "writes": [(2, 0, 1)]}
        return {"reads": [(1, 0, 5)], "writes": [(2, 0, 5)] if mine else []}

    both = {"reads": [(1, 0, 5)], "writes": [(2, 0, 5)]}
    yield What.ALL_REDUCE, lambda _: both, {"reduction": Reduction.SUM}
    yield What.ALL_REDUCE, lambda _: both, {"reduction": Reduction.AVG}
    yield What.ALL_REDUCE, lambda _: both, {"reduction": Reduction.PREMUL_SUM, "factor": 0.3}
    yield What.REDUCE_SCATTER, lambda _: {"reads": part, "writes": [(2, 0, 1)]}, {"reduction": Reduction.SUM}
    yield What.ALL_GATHER, lambda _: {"reads": [(1, 4, 1)], "writes": into}, {}
    yield What.ALL_TO_ALL, lambda _: {"reads": part, "writes": into}, {}
    for what in (What.BROADCAST, What.GATHER, What.SCATTER):
        yield what, lambda rank, what=what: rooted(rank, what), {"root": 1}
    yield What.REDUCE, lambda rank: rooted(rank, What.REDUCE), {"root": 1, "reduction": Reduction.SUM}
    yield What.BARRIER, lambda _: {}, {}
    ring = lambda rank: {"reads": [(1, 0, 5, (rank + 1) % n)], "writes": [(2, 0, 5, (rank - 1) % n)]}  # noqa: E731
    yield What.EXCHANGE, ring, {}


def test_collectives_of_two_executors_have_the_bits_of_one(make_device):
    a, b, single = [make_device() for _ in range(3)]
    apart, together = Ranks([a, b], 4), Ranks([single], 4)
    for what, how, same in everyone(apart):
        assert run(apart, what, how, 5, **same) == run(together, what, how, 5, **same), what


@pytest.mark.parametrize("executors", [2, 3])
@pytest.mark.parametrize("least", [1, 1 << 20], ids=["divided", "too small to be divided"])
def test_divided_collectives_have_the_bits_of_one_executor(make_device, executors, least):
    apart, together = Ranks([make_device() for _ in range(executors)], 4, least=least), Ranks([make_device()], 4)
    apart.all(What.BARRIER, lambda _: {})  # all executors learn who is in the group
    together.all(What.BARRIER, lambda _: {})
    for what, how, same in everyone(apart):
        assert run(apart, what, how, 5, **same) == run(together, what, how, 5, **same), what


def test_first_rank_may_be_at_any_of_the_executors(make_device):
    a, b = make_device(), make_device()
    ranks = Ranks([b, a, b], 3)
    assert len(set(run(ranks, What.ALL_REDUCE, lambda _: BOTH, 5, reduction=Reduction.SUM))) == 1


BOTH = {"reads": [(1, 0, 5)], "writes": [(2, 0, 5)]}


def test_large_operands_are_copied_by_the_mover_and_in_place(make_device):
    a, b = make_device(), make_device()
    ranks, count = Ranks([a, b], 2), 1 << 20
    body = client_body(4 * count)
    for rank, client in enumerate(ranks.clients):
        client.run(body, [1])
        client.write(1, torch.full((count,), rank + 1.5).numpy().tobytes())
    for _ in range(3):
        ranks.all(
            What.ALL_REDUCE, lambda _: {"reads": [(1, 0, count)], "writes": [(1, 0, count)]}, reduction=Reduction.SUM
        )
    found = [torch.frombuffer(bytearray(c.read(1, 4 * count)), dtype=torch.float32) for c in ranks.clients]
    assert all(bool((f == 16.0).all()) for f in found)
    for device in (a, b):
        device.check()


def client_body(nbytes):
    from services.executor.tests.conftest import Body

    return Body().alloc("x", nbytes)


def failure(client, kind="executor.collective"):
    from services.executor.tests.conftest import RemoteError

    with pytest.raises(RemoteError) as caught:
        client.sync()
    assert caught.value.code == kind
    return caught.value.message


def waiting(make_device, **how):
    """Two ranks of which one waits for the other: rank 1 at the second device."""
    a, b = make_device(), make_device()
    ranks = Ranks([a, b], 2, **how)
    for client in ranks.clients:
        client.make(1, 1.0)
    ranks.all(What.BARRIER, lambda _: {})  # from now on, the home knows all ranks
    for client in ranks.clients:
        client.sync()
    ranks.sequence += 1
    return a, b, ranks


SUM = {"reads": [(1, 0, 1)], "writes": [(1, 0, 1)], "reduction": Reduction.SUM}


def wait_for(condition):
    done = threading.Event()
    for _ in range(WAIT_S * 100):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("the condition did not become true")


def has_arrived(device, count):
    return lambda: device.call(lambda: len(device.loop.collectives.groups._waiting)) == count


def test_rank_at_another_executor_that_dies_ends_the_group_with_its_reason(make_device):
    a, b, ranks = waiting(make_device)
    ranks.send(0, What.ALL_REDUCE, **SUM)
    wait_for(has_arrived(a, 1))
    b.call(lambda: b.loop.sessions.close("rank1", "its client was killed"))
    text = failure(ranks.clients[0])
    assert "rank 1 has ended: its client was killed" in text and "train.py:1" in text
    assert a.held().keys() == {"rank0"}


def test_first_rank_that_dies_ends_ranks_at_other_executors(make_device):
    a, _, ranks = waiting(make_device)
    ranks.send(1, What.ALL_REDUCE, **SUM)
    wait_for(has_arrived(a, 1))
    a.call(lambda: a.loop.sessions.close("rank0", "its client was killed"))
    assert "rank 0 has ended: its client was killed" in failure(ranks.clients[1])
    # the rank's results are poisoned, and its session goes on
    ranks.clients[1].make(9, 2.0)
    assert ranks.clients[1].floats(9, 1) == [2.0]


@pytest.mark.parametrize("lost", ["rank0", "rank1"])
def test_ranks_at_two_executors_that_can_go_on_elsewhere_lose_their_sessions_together(make_device, lost):
    a, b, ranks = waiting(make_device)
    waits = ranks.clients[lost == "rank0"]
    ranks.send(int(lost == "rank0"), What.ALL_REDUCE, **SUM, recovers=True)
    wait_for(has_arrived(a, 1))
    home = a if lost == "rank0" else b
    home.call(functools.partial(home.loop.sessions.close, lost, "its client was killed", passing=True))
    with pytest.raises(ChannelClosedError, match=r"its client was killed|closed the connection") as caught:
        waits.sync()
    assert caught.value.passing


def test_rank_that_can_go_on_elsewhere_breaks_its_connection_before_its_thread_says_goodbye(make_device, monkeypatch):
    abort = PeerLink.abort

    def late(link, why):
        link._thread.join(0.5)  # the thread runs first, if it has something to do
        abort(link, why)

    monkeypatch.setattr(PeerLink, "abort", late)
    a, b, ranks = waiting(make_device)
    ranks.send(0, What.ALL_REDUCE, **SUM, recovers=True)
    wait_for(has_arrived(a, 1))
    b.call(functools.partial(b.loop.sessions.close, "rank1", "its client was killed", passing=True))
    with pytest.raises(ChannelClosedError) as caught:
        ranks.clients[0].sync()
    assert caught.value.passing


def test_second_group_at_a_known_executor_needs_no_ticket(make_device):
    _, b, ranks = waiting(make_device)
    other = bytes(16)
    ranks.clients[1].channel.send(Kind.GROUP, pack_json({"group": other.hex(), "instance": ranks.home}))
    for rank in (0, 1):
        ranks.send(rank, What.BARRIER, group=other, sequence=1)
    assert [client.sync() for client in ranks.clients] == [{}, {}]
    stranger = b.open("stranger", tenant="default")
    stranger.channel.send(Kind.GROUP, pack_json({"group": other.hex(), "instance": ranks.home}))
    assert "ticket" in failure(stranger)


def test_session_that_ends_while_it_waits_ends_its_part_at_the_other_executor(make_device):
    a, _, ranks = waiting(make_device)
    ranks.send(1, What.ALL_REDUCE, **SUM)
    wait_for(has_arrived(a, 1))
    ranks.clients[1].channel.close()
    a.wait_closed("rank1+0")
    ranks.send(0, What.ALL_REDUCE, **SUM)
    assert "rank 1" in failure(ranks.clients[0])


def test_rank_that_does_not_come_is_named_at_both_executors(make_device):
    _, _, ranks = waiting(make_device)
    ranks.timeout_ms = 50
    ranks.send(1, What.ALL_REDUCE, **SUM)
    text = failure(ranks.clients[1])
    assert "rank 0 did not come to all_reduce (number 2 of the group) at train.py:2 within 0.05 s" in text


def test_unusable_operand_fails_the_collective_for_all_ranks_with_its_reason(make_device):
    _, _, ranks = waiting(make_device)
    ranks.send(0, What.ALL_REDUCE, **SUM)
    ranks.send(1, What.ALL_REDUCE, **SUM | {"reads": [(77, 0, 1)]})
    for client in ranks.clients:
        assert "rank 1, all_reduce at train.py:2: buffer 77 does not exist" in failure(client)
    ranks.all(What.BARRIER, lambda _: {})  # the group goes on
    for client in ranks.clients:
        client.sync()


def test_ranks_at_two_executors_that_differ_are_told_both_lines(make_device):
    _, _, ranks = waiting(make_device)
    ranks.send(0, What.ALL_REDUCE, **SUM)
    ranks.send(1, What.BARRIER)
    for client in ranks.clients:
        text = failure(client)
        assert "different collective: all_reduce and barrier" in text and "train.py:1" in text and "train.py:2" in text


def test_operands_of_any_size_are_in_memory_that_both_executors_share(make_device):
    """The rank's executor neither writes nor reads buffers at the other one, after it has connected."""
    a, b = make_device(), make_device()
    if not a.loop.launcher._on_host:
        pytest.skip("a GPU computes with copies in its own memory")
    ranks = Ranks([a, b], 2)
    ranks.all(What.BARRIER, lambda _: {})
    ranks.clients[1].sync()
    for what, how, same in everyone(ranks):
        run(ranks, what, how, 5, **same)
    counters = a.call(lambda: a.loop.sessions["rank1+0"].counters)
    assert counters.bytes_in == counters.bytes_out == 0
    assert a.call(lambda: not a.loop.sessions["rank1+0"].buffers)


def test_operands_pass_through_the_socket_if_the_other_device_cannot_compute_with_host_memory(make_device, monkeypatch):
    monkeypatch.setattr("wooly_executor.collectives.peers.PinnedArea", lambda segment: None)
    a, b = make_device(), make_device()
    ranks, single = Ranks([a, b], 2), Ranks([make_device()], 2)
    for what, how, same in everyone(ranks):
        assert run(ranks, what, how, 5, **same) == run(single, what, how, 5, **same), what
    assert a.call(lambda: a.loop.sessions["rank1+0"].counters.bytes_in) > 0


def test_operands_above_the_limit_of_host_memory_fail_for_all_ranks(make_device):
    a, b = make_device(), make_device(limits=HostLimits(session=4 << 20))
    ranks, count = Ranks([a, b], 2), 1 << 20
    for client in ranks.clients:
        client.run(client_body(4 * count), [1])
        client.write(1, bytes(4 * count))
    ranks.all(What.ALL_REDUCE, lambda _: {"reads": [(1, 0, count)], "writes": [(1, 0, count)]}, reduction=Reduction.SUM)
    for client in ranks.clients:
        assert "WOOLY_EXECUTOR_SESSION_HOST" in failure(client)


@pytest.mark.parametrize("count", [1 << 10, 1 << 20], ids=["copied at once", "copied by the mover"])
def test_results_for_which_the_device_has_no_room_fail_only_their_rank(make_device, count):
    """The rank writes a buffer whose content another buffer shares, so the results need a copy of it."""
    swap = SwapSettings(Policy(idle_ns=0), patience_ns=10_000_000)
    a, b = make_device(), make_device(memory=10 << 20, swap=swap)
    ranks, data = Ranks([a, b], 2, scope=Scope.TENANT), bytes(4 << 20)
    for client in ranks.clients:
        for buffer in (1, 2):
            client.load(buffer, data)
            client.sealed()
    other = b.open("other")
    other.run(client_body(5 << 20), [1], reply=True)
    part = {"reads": [(2, 0, count)], "writes": [(1, 0, count)], "reduction": Reduction.SUM}
    ranks.all(What.ALL_REDUCE, lambda _: part)
    ranks.clients[0].sync()
    assert "CUDA out of memory" in failure(ranks.clients[1])
    assert ranks.clients[1].read(2, len(data)) == data
    other.sync()
    b.check()
    ranks.all(What.BARRIER, lambda _: {})  # the group goes on
    for client in ranks.clients:
        client.sync()


def test_operands_for_which_the_host_has_no_memory_fail_for_all_ranks(make_device, monkeypatch):
    _, b, ranks = waiting(make_device)
    allocate = remote._host_memory

    def fails(link, nbytes):
        if nbytes:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        return allocate(link, nbytes)

    monkeypatch.setattr(remote, "_host_memory", fails)
    for rank in (0, 1):
        ranks.send(rank, What.ALL_REDUCE, **SUM)
    for client in ranks.clients:
        assert "not enough memory" in failure(client)
    assert b.call(lambda: b.loop.sessions["rank1"].host_use().peers) == 0
    monkeypatch.undo()
    ranks.all(What.BARRIER, lambda _: {})  # the group goes on
    for client in ranks.clients:
        client.sync()


def test_host_memory_of_a_collective_is_on_the_account_of_its_session(make_device):
    a, b, ranks = waiting(make_device)
    ranks.send(1, What.ALL_REDUCE, **SUM)
    wait_for(has_arrived(a, 1))
    assert b.call(lambda: b.loop.sessions["rank1"].host_use().peers) == 64
    ranks.send(0, What.ALL_REDUCE, **SUM)
    ranks.clients[1].sync()
    assert b.call(lambda: b.loop.sessions["rank1"].host_use().peers) == 0


def test_waiting_rank_may_leave_the_device(make_device):
    """The session at the other executor is swapped out while it waits, and gets its results when it is back."""
    swap = SwapSettings(Policy(idle_ns=0), 1 << 30)
    a, b = make_device(), make_device(memory=3 << 20, swap=swap)
    ranks = Ranks([a, b], 2)
    count = 1 << 18
    for rank, client in enumerate(ranks.clients):
        client.run(client_body(4 * count), [1])
        client.write(1, torch.full((count,), rank + 1.0).numpy().tobytes())
    ranks.sequence = 1
    part = {"reads": [(1, 0, count)], "writes": [(1, 0, count)], "reduction": Reduction.SUM}
    ranks.send(1, What.ALL_REDUCE, **part)
    wait_for(has_arrived(a, 1))
    other = b.open("other")
    other.run(client_body(5 << 19), [1], reply=True)
    wait_for(lambda: b.residence()["rank1"] != "here")
    ranks.send(0, What.ALL_REDUCE, **part)
    found = torch.frombuffer(bytearray(ranks.clients[1].read(1, 4 * count)), dtype=torch.float32)
    assert bool((found == 3.0).all())


# -- divided groups ----------------------------------------------------------------------------------------------------


def divided(make_device, count=3, elements=4, **how):
    """Ranks on as many executors, each with `elements` ones in buffer 1. The executors know all ranks."""
    devices = [make_device(**how) for _ in range(count)]
    ranks = Ranks(devices, count, least=1)
    ranks.all(What.BARRIER, lambda _: {})
    for client in ranks.clients:
        client.run(client_body(4 * elements), [1])
        client.write(1, torch.ones(elements).numpy().tobytes())
        client.sync()
    ranks.sequence += 1
    return devices, ranks


def summed(elements=4, **how):
    both = [(1, 0, elements)]
    return {"reads": both, "writes": both, "reduction": Reduction.SUM} | how


def test_large_divided_collectives_are_computed_by_all_executors(make_device):
    count = 1 << 20
    devices, ranks = divided(make_device, elements=count)
    for k in range(3):
        ranks.sequence = 2 + 2 * k  # other numbers of the group go to one executor
        for rank in range(3):
            ranks.send(rank, What.ALL_REDUCE, **summed(count))
    found = [torch.frombuffer(bytearray(c.read(1, 4 * count)), dtype=torch.float32) for c in ranks.clients]
    assert all(bool((f == 27.0).all()) for f in found)
    for k, device in enumerate(devices):
        device.check()
        held = device.held()
        assert held.keys() == {f"rank{k}", *[f"rank{other}+0" for other in range(3) if other != k]}


@pytest.mark.parametrize("lost", [0, 2])
def test_rank_of_a_divided_group_that_dies_ends_the_others_everywhere(make_device, lost):
    devices, ranks = divided(make_device)
    waiting = [rank for rank in range(3) if rank != lost]
    for rank in waiting:
        ranks.send(rank, What.ALL_REDUCE, **summed())
    for rank in waiting:
        wait_for(has_arrived(devices[rank], 2))
    devices[lost].call(lambda: devices[lost].loop.sessions.close(f"rank{lost}", "its client was killed"))
    for rank in waiting:
        text = failure(ranks.clients[rank])
        assert f"rank {lost} has ended: its client was killed" in text or "cannot be used any more" in text
        ranks.clients[rank].make(9, 2.0)
        assert ranks.clients[rank].floats(9, 1) == [2.0]


def test_ranks_of_a_divided_group_that_can_go_on_elsewhere_lose_their_sessions_together(make_device):
    devices, ranks = divided(make_device)
    for rank in (0, 1):
        ranks.send(rank, What.ALL_REDUCE, **summed(recovers=True))
    wait_for(has_arrived(devices[0], 2))
    wait_for(has_arrived(devices[1], 2))
    devices[2].call(lambda: devices[2].loop.sessions.close("rank2", "its client was killed", passing=True))
    for rank in (0, 1):
        with pytest.raises(ChannelClosedError) as caught:
            ranks.clients[rank].sync()
        assert caught.value.passing


def test_ranks_of_which_some_ask_for_a_small_collective_are_told_both_lines_soon(make_device, monkeypatch):
    """Only a part of the ranks divides the collective, so ranks are missing at all executors but the first one."""
    monkeypatch.setattr(service, "GRACE_S", 0.2)
    devices = [make_device() for _ in range(3)]
    ranks = Ranks(devices, 3, least=256)
    for client in ranks.clients:
        client.run(client_body(4096), [1])
    ranks.all(What.BARRIER, lambda _: {})
    ranks.sequence += 1
    ranks.send(0, What.ALL_REDUCE, **summed(1))
    for rank in (1, 2):
        ranks.send(rank, What.ALL_REDUCE, **summed(1024))
    for client in ranks.clients:
        text = failure(client)
        assert "different sizes: 1 and" in text and "of the part that one executor carries" in text
        assert "train.py:1" in text and ("train.py:2" in text or "train.py:3" in text)


def test_ranks_of_a_divided_group_with_different_roots_are_told_both_lines_soon(make_device, monkeypatch):
    monkeypatch.setattr(service, "GRACE_S", 0.2)
    _, ranks = divided(make_device)
    for client in ranks.clients:
        client.make(2, *[0.0] * 3)
    for rank, root in enumerate((1, 2, 1)):
        writes = [(2, 4 * k, 1) for k in range(3)] if rank == root else []
        ranks.send(rank, What.GATHER, reads=[(1, 0, 1)], writes=writes, root=root)
    for client in ranks.clients:
        text = failure(client)
        assert "different root" in text and "train.py:2" in text


def test_unusable_operand_fails_all_shares_and_the_divided_group_goes_on(make_device):
    _, ranks = divided(make_device)
    for rank in range(3):
        ranks.send(rank, What.ALL_REDUCE, **summed(**({"reads": [(77, 0, 4)]} if rank == 1 else {})))
    for client in ranks.clients:
        assert "rank 1, all_reduce at train.py:2: buffer 77 does not exist" in failure(client)
    for client in ranks.clients:
        client.run(client_body(16), [2])
        client.write(2, torch.ones(4).numpy().tobytes())
    ranks.sequence += 1
    for rank in range(3):
        ranks.send(rank, What.ALL_REDUCE, **summed(reads=[(2, 0, 4)], writes=[(2, 0, 4)]))
    assert [client.floats(2, 4) for client in ranks.clients] == [[3.0] * 4] * 3


def test_number_that_is_used_again_fails_only_its_sender_and_the_divided_group_goes_on(make_device):
    devices, ranks = divided(make_device)
    for rank in range(3):
        ranks.send(rank, What.ALL_REDUCE, **summed())
    ranks.send(0, What.ALL_REDUCE, **summed())
    assert "rank 0 sends number 2 of its group's collectives" in failure(ranks.clients[0])
    ranks.sequence += 1
    for rank in range(3):
        ranks.send(rank, What.BARRIER)
    for client in ranks.clients:
        client.sync()
    for device in devices:
        device.check()


def test_rank_that_does_not_come_to_a_divided_collective_is_named(make_device):
    _, ranks = divided(make_device)
    ranks.timeout_ms = 100
    for rank in (1, 2):
        ranks.send(rank, What.ALL_REDUCE, **summed())
    for rank in (1, 2):
        assert "rank 0 did not come to all_reduce (number 2 of the group) at train.py" in failure(ranks.clients[rank])


def test_end_of_a_divided_group_forgets_it_everywhere(make_device):
    devices, ranks = divided(make_device)
    for rank, client in enumerate(ranks.clients):
        ranks.send(rank, What.LEAVE)
        client.sync()
    for device in devices:
        assert device.call(lambda device=device: len(device.loop.collectives.groups)) == 0
        guests = device.call(lambda device=device: list(device.loop.collectives.remote._guests.values()))
        assert not any(guest.groups or guest.divisions for guest in guests)


def test_waiting_rank_of_a_divided_group_may_leave_the_device(make_device):
    count = 1 << 18
    (a, b), ranks = divided(make_device, 2, count, memory=3 << 20, swap=SwapSettings(Policy(idle_ns=0), 1 << 30))
    ranks.send(1, What.ALL_REDUCE, **summed(count))
    wait_for(has_arrived(a, 1))
    other = b.open("other")
    other.run(client_body(5 << 19), [1], reply=True)
    wait_for(lambda: b.residence()["rank1"] != "here")
    ranks.send(0, What.ALL_REDUCE, **summed(count))
    for client in ranks.clients:
        found = torch.frombuffer(bytearray(client.read(1, 4 * count)), dtype=torch.float32)
        assert bool((found == 2.0).all())
    for device in (a, b):
        device.check()


@pytest.mark.parametrize(
    "said",
    [
        {"carriers": [0], "least": 1},
        {"carriers": [0, 0], "least": 1},
        {"carriers": [0, 1], "least": 0},
        {"carriers": [0, 99], "least": 1},
        {"carriers": [0, 1], "least": 1},  # nobody has said who carries the other share
        {"carriers": "01", "least": 1},
        {"carriers": [0, 1], "least": 1, "more": 1},
    ],
)
def test_malformed_division_is_refused(device, said):
    client = device.open("rank0")
    client.channel.send(Kind.GROUP, pack_json({"group": GROUP.hex()} | said))
    assert "GROUP frame" in failure(client)


def test_frame_of_another_size_than_the_division_fails_only_its_sender(make_device):
    _, ranks = divided(make_device, 2)
    ranks.size = 3
    ranks.send(0, What.ALL_REDUCE, **summed())
    assert "the group has 2 ranks, but the frame says 3" in failure(ranks.clients[0])


# -- hostile and silent peers ------------------------------------------------------------------------------------------


def test_wrong_token_and_unknown_executor_fail_only_the_rank(make_device):
    a, b = make_device(), make_device()
    for changes, text in (
        ({"token": "wrong"}, "the channel token is not valid"),
        ({"endpoints": ["unix:///does/not/exist"]}, "cannot be used any more"),
        ({"endpoints": ["nats://host:1#subject"]}, "no endpoint that other executors may use"),
        ({"endpoints": ["neither"]}, "the scheme must be one of"),
    ):
        ranks = Ranks([a, b], 2, tell=False)
        ranks.clients[1].channel.send(Kind.GROUP, pack_json(ranks.introduction(1, **changes)))
        ranks.clients[1].make(1, 1.0)
        ranks.sequence = 1
        ranks.send(1, What.ALL_REDUCE, **SUM)
        assert text in failure(ranks.clients[1])
        for client in ranks.clients:
            client.make(8, 3.0)
            assert client.floats(8, 1) == [3.0]
            client.close()
        a.wait_closed("rank0")
        b.wait_closed("rank1")
        a.closed.clear()
        b.closed.clear()


def test_session_has_a_limited_number_of_connections_to_other_executors(make_device, monkeypatch):
    """Frames that named ever other executors for one group used to start a thread each, without a limit."""
    monkeypatch.setattr(remote, "LINKS_OF_SESSION", 2)
    a, b = make_device(), make_device()
    ranks = Ranks([a, b], 2, tell=False)
    client, before = ranks.clients[1], set(threading.enumerate())
    for k in range(5):
        client.channel.send(Kind.GROUP, pack_json(ranks.introduction(1) | {"instance": f"instance {k}"}))
        if k < 2:
            client.sync()
        else:
            assert "connections to 2 other executors, which is the limit" in failure(client)
    started = [t for t in set(threading.enumerate()) - before if t.name == "peer"]
    assert len(started) == 2
    client.close()
    b.wait_closed("rank1")
    for thread in started:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_executor_that_is_given_up_before_it_is_connected_is_not_used_later(make_device, monkeypatch):
    connecting, go_on, connect = threading.Event(), threading.Event(), peers.ChannelClient.connect

    def slow(*given, **more):
        connecting.set()
        go_on.wait(WAIT_S)
        return connect(*given, **more)

    monkeypatch.setattr(remote, "MARGIN_S", 0.0)
    a, b = make_device(), make_device()
    ranks = Ranks([a, b], 2, timeout_ms=50)
    ranks.clients[1].sync()
    monkeypatch.setattr(peers.ChannelClient, "connect", slow)
    ranks.sequence = 1
    ranks.send(1, What.BARRIER)
    try:
        assert connecting.wait(WAIT_S)
        (link,) = b.call(lambda: list(b.loop.collectives.remote._guests["rank1"].links.values()))
        wait_for(lambda: link._why)
    finally:
        go_on.set()
    assert "it has not answered within 0.05 s" in failure(ranks.clients[1])
    assert a.held().keys() == {"rank0"}


def test_part_of_a_session_that_has_ended_is_not_begun(monkeypatch):
    started, told = [], []
    monkeypatch.setattr(peers, "start_thread", lambda work, name: started.append(work))
    monkeypatch.setattr(peers.ChannelClient, "connect", lambda *_, **__: pytest.fail("it has connected"))
    peer = Peer(executor_id="a", endpoints=["unix:///nowhere"], session_id="s", token=TOKEN)
    link = peers.PeerLink(peer, "home", None)
    call = Collective(GROUP, 1, 0, 2, 1000, What.BARRIER)
    link.submit(peers.Errand(call, memoryview(b""), memoryview(b""), lambda *outcome: told.append(outcome)))
    link.close("its client closed it", passing=False)
    started[0]()
    assert told == [("the session has ended", False)]


def test_buffers_at_the_other_executor_are_freed_after_failures(make_device, monkeypatch):
    monkeypatch.setattr(peers, "PinnedArea", lambda segment: None)
    a, _, ranks = waiting(make_device)
    for _ in range(4):
        for reads, ok in (([(1, 0, 1)], True), ([(77, 0, 1)], False)):
            ranks.send(0, What.ALL_REDUCE, **SUM | {"reads": reads, "writes": [(1, 0, 1)]})
            ranks.send(1, What.ALL_REDUCE, **SUM)
            for client in ranks.clients:
                if ok:
                    client.sync()
                else:
                    assert "buffer 77 does not exist" in failure(client)
                    client.make(1, 1.0)  # in place of the poisoned buffer
            ranks.sequence += 1
    assert a.held()["rank1+0"][1] == 2


def test_another_process_at_the_endpoint_is_not_used(make_device):
    a, b, c = [make_device() for _ in range(3)]
    c.loop.admission.open_for_token(TOKEN)
    ranks = Ranks([a, b], 2, tell=False)
    ranks.clients[1].channel.send(Kind.GROUP, pack_json(ranks.introduction(1, endpoints=[str(c.endpoint)])))
    ranks.sequence = 1
    ranks.send(1, What.BARRIER)
    assert "another process answers there" in failure(ranks.clients[1])


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"group": "no hex", "instance": ""},
        {"group": "ab" * 16, "instance": "x", "more": 1},
        {"group": "ab" * 16, "instance": "x", "peer": {"executor_id": "a.b"}},
        {
            "group": "ab" * 16,
            "instance": "x",
            "peer": {"executor_id": "a", "endpoints": [], "session_id": "s", "token": ""},
        },
        {"group": "ab" * 16, "instance": "x"},
    ],
)
def test_malformed_introduction_is_refused(make_device, said):
    device = make_device()
    device.loop.admission.open_for_token(TOKEN)
    client = device.open("s")
    client.channel.send(Kind.GROUP, pack_json(said))
    assert "not valid" in (text := failure(client)) or "ticket" in text
    client.make(1, 4.0)
    assert client.floats(1, 1) == [4.0]


def test_introduction_that_is_no_json_is_refused(device):
    client = device.open("s")
    client.channel.send(Kind.GROUP, b"\xff{")
    failure(client, "wis.decode")
    client.make(1, 4.0)
    assert client.floats(1, 1) == [4.0]


def test_executor_with_a_router_connects_nowhere_without_its_ticket(device):
    client = device.open("s")
    peer = {"executor_id": "x", "endpoints": ["unix:///x"], "session_id": "s+0", "token": ""}
    client.channel.send(Kind.GROUP, pack_json({"group": GROUP.hex(), "instance": "x", "peer": peer}))
    assert "only with a ticket that its router has signed" in failure(client)


def test_ticket_is_checked_for_signature_session_tenant_executor_and_time():
    key, other = Key.new("cluster"), Key.new("cluster")
    whose = {"session_id": "s", "tenant": "t", "executor_id": "x"}
    now = 100.0
    entry = SignedPass(key.public, "s", "t", "x", lambda: now)
    peer = {"executor_id": "home"}
    good = peer_ticket(key, peer, now=100.0, **whose)
    assert entry.peer(good) == peer
    for wrong, text in (
        (peer_ticket(other, peer, now=100.0, **whose), "not signed"),
        (peer_ticket(key, peer, now=10.0, **whose), "expired"),
        *[(peer_ticket(key, peer, now=100.0, **whose | {n: "z"}), "for another") for n in whose],
        ("x.y.z", "not signed"),
        ("", "not signed"),
    ):
        with pytest.raises(Exception, match=text):
            entry.peer(wrong)
    with pytest.raises(CollectiveError, match="not valid"):
        Peer.read({"executor_id": "home", "endpoints": ["unix:///a"], "session_id": "a b", "token": ""})
    assert Introduction(group="ab" * 16, instance="i").ticket == ""


class Impostor:
    """Listens like an executor, and answers what it is told to."""

    def __init__(self, folder, answers):
        self.path = f"{folder}/impostor.sock"
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(self.path)
        self.socket.listen()
        self.answers, self.held = answers, []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.held.append(connection)
            connection.recv(1 << 16)
            for data in self.answers:
                connection.sendall(data)

    def close(self):
        self.socket.close()
        for connection in self.held:
            connection.close()


def frame(kind, payload, seq=1):
    from wooly_bus.channel.framing import HEADER

    return HEADER.pack(len(payload), kind, 0, 0, seq) + payload


def welcome(**told):
    return frame(Kind.WELCOME, json.dumps({"window": 1 << 20, "device": {"instance": "home"}} | told).encode())


WELCOME = welcome()


@pytest.mark.parametrize(
    "answers",
    [
        [b"\0" * 64],
        [frame(Kind.WELCOME, b"no json")],
        [frame(Kind.WELCOME, b"[1]")],
        [WELCOME, frame(Kind.DATA, bytes(999), 2)],
        [WELCOME, frame(Kind.RESULT, b"{}", 2)],
        [WELCOME, frame(Kind.ERROR, b"\xff", 2)],
        [WELCOME, frame(Kind.DATA, bytes(64), 7)],
        [welcome(device="home")],
        [welcome(device=[1])],
    ],
)
def test_impostor_that_answers_nonsense_fails_only_the_collective(make_device, tmp_path, answers):
    device = make_device()
    device.loop.admission.open_for_token(TOKEN)
    impostor = Impostor(tmp_path, answers)
    client = device.open("rank1")
    client.make(1, 1.0)
    peer = {
        "executor_id": "home",
        "endpoints": [f"unix://{impostor.path}"],
        "session_id": "rank1+0",
        "token": TOKEN,
    }
    client.channel.send(Kind.GROUP, pack_json({"group": GROUP.hex(), "instance": "home", "peer": peer}))
    client.collective(
        What.ALL_REDUCE, group=GROUP, sequence=1, rank=1, size=2, timeout_ms=60_000, dtype=DType.F32, **SUM
    )
    assert "executor home, which carries the collectives of the group, cannot be used any more" in failure(client)
    client.make(5, 4.0)
    assert client.floats(5, 1) == [4.0]
    impostor.close()


def test_silent_executor_is_given_up_after_the_timeout(make_device, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "MARGIN_S", 0.05)
    device = make_device()
    device.loop.admission.open_for_token(TOKEN)
    impostor = Impostor(tmp_path, [WELCOME])
    client = device.open("rank1")
    client.make(1, 1.0)
    peer = {"executor_id": "home", "endpoints": [f"unix://{impostor.path}"], "session_id": "rank1+0", "token": TOKEN}
    client.channel.send(Kind.GROUP, pack_json({"group": GROUP.hex(), "instance": "home", "peer": peer}))
    how = {"group": GROUP, "sequence": 1, "rank": 1, "size": 2, "timeout_ms": 100, "origin": "train.py:7"}
    client.collective(What.ALL_REDUCE, dtype=DType.F32, **how, **SUM)
    text = failure(client)
    assert (
        "has not answered within 0.15 s" in text
        and "Rank 1 waits for it in all_reduce" in text
        and "train.py:7" in text
    )
    impostor.close()
