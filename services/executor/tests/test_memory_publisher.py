"""Tests of the publisher of memory charges: the order of samples, and sums while NATS is away."""

import asyncio
from types import SimpleNamespace

import pytest
from wooly_bus.streams import StreamError
from wooly_executor.billing import memory_publisher
from wooly_executor.billing.memory_publisher import MemoryPublisher
from wooly_executor.billing.memory_samples import MemorySample


def sample(sequence, start, end, own, *, session="s", last=False, shared=0):
    elapsed = end - start
    return MemorySample(session, "t", sequence, start, end, own, shared, own * elapsed, shared * elapsed, 0, 0, last)


@pytest.fixture
def publisher(monkeypatch):
    sent, state = [], SimpleNamespace(samples=[], away=False)

    async def publish(js, event, payload, *, id):
        if state.away:
            raise StreamError("NATS is away")
        sent.append((id, event.decoded(event.encoded(payload))))

    async def ensure(*args, **kwargs):
        return None

    def call(function):
        from concurrent.futures import Future

        future = Future()
        future.set_result(function())
        return future

    def samples():
        found, state.samples = state.samples, []
        return found

    monkeypatch.setattr(memory_publisher, "publish", publish)
    monkeypatch.setattr(memory_publisher, "ensure_stream", ensure)
    loop = SimpleNamespace(call=call, vram=SimpleNamespace(samples=samples))
    return MemoryPublisher(None, loop, "gpu-0"), state, sent


def step(made, samples):
    made[1].samples = samples
    try:
        asyncio.run(made[0].publish())
    except StreamError:
        return False
    return True


def test_publisher_consecutive_samples_get_consecutive_numbers(publisher):
    step(publisher, [sample(1, 0, 1500, 7)])
    step(publisher, [sample(2, 1500, 2000, 7, last=True)])
    (first_id, first), (last_id, last) = publisher[2]
    assert (first.sequence, last.sequence, last.last) == (1, 2, True) and first_id != last_id
    assert first.own_byte_us + last.own_byte_us == 7 * 2000 // 1000  # rounded down, but the remainder is carried over


def test_publisher_without_nats_adds_samples_up(publisher):
    publisher[1].away = True
    assert not step(publisher, [sample(1, 0, 1_000_000, 10)])
    assert not step(publisher, [sample(2, 1_000_000, 2_000_000, 30)])
    publisher[1].away = False
    assert step(publisher, [sample(3, 2_000_000, 3_000_000, 0)])
    ((_, event),) = publisher[2]
    assert (event.sequence, event.from_ns, event.to_ns, event.own) == (1, 0, 3_000_000, 0)
    assert event.own_byte_us == 10_000 + 30_000


def test_publisher_session_without_charges_is_reported_rarely_and_at_its_end(publisher):
    step(publisher, [sample(1, 0, 1_000_000_000, 0)])
    assert publisher[2] == []
    step(publisher, [sample(2, 1_000_000_000, 61_000_000_000, 0)])
    step(publisher, [sample(3, 61_000_000_000, 61_000_000_001, 0, last=True)])
    assert [(e.from_ns, e.to_ns, e.last) for _, e in publisher[2]] == [
        (0, 61_000_000_000, False),
        (61_000_000_000, 61_000_000_001, True),
    ]
