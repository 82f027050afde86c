"""Tests of the decision which uploads are offered: weights are, the batches of a training are not."""

import random

import pytest
import torch
from wooly import api
from wooly.contents import MOST_REFILLS, WINDOW, OfferPolicy
from wooly_bus.contents import MIN_OFFER_BYTES

SIZES = [1 << 20, 4 << 20, 1 << 20]


def test_policy_offers_new_buffers_and_a_second_filling():
    policy = OfferPolicy()
    assert all(policy.accepts(buffer, SIZES[buffer % 3], ()) for _ in range(2) for buffer in range(10_000))


@pytest.mark.parametrize("alive", [0, 1, 3])
@pytest.mark.parametrize("ids", [1, 3, 100])
def test_policy_batches_stop_the_offers_and_weights_bring_them_back(ids, alive):
    """Batches get ids that temporary tensors had before; a loader may keep some batches alive."""
    policy, free, live = OfferPolicy(), list(range(ids + alive)), []
    draw = random.Random(0)
    offered = []
    for _ in range(100):
        live.append(free.pop(draw.randrange(len(free))))
        offered.append(policy.accepts(live[-1], 1 << 20, free))
        if len(live) > alive:
            free.append(live.pop(0))
    most = WINDOW + MOST_REFILLS
    assert MOST_REFILLS <= sum(offered) <= most and not any(offered[most:])
    weights = [policy.accepts(n, SIZES[n % 3], free) for n in range(1000, 1100)]
    assert not weights[0] and all(weights[2 * MOST_REFILLS :])


def test_policy_few_batches_between_many_weights_stop_nothing():
    policy = OfferPolicy()
    assert all(policy.accepts(buffer, 1 << 20, ()) for n in range(1000) for buffer in (0, 10 + 2 * n, 11 + 2 * n))


def test_policy_second_model_after_the_first_was_freed_is_offered_again():
    policy, sizes = OfferPolicy(), [1 << 20, 2 << 20, 3 << 20]
    assert all(policy.accepts(n, sizes[n % 3], ()) for n in range(300))
    again = [policy.accepts(n, sizes[n % 3], range(n + 1, 300)) for n in range(300)]
    assert all(again)


@pytest.fixture
def offers(cuda, monkeypatch):
    """Sizes of the uploads that the session offers."""
    (link,) = api.attached_links()
    found, offer = [], link.offer
    monkeypatch.setattr(link, "offers", OfferPolicy())
    monkeypatch.setattr(
        link, "offer", lambda buffer, n, name, head: (found.append(n), offer(buffer, n, name, head=head))[1]
    )
    return found


def test_training_offers_its_weights_and_only_its_first_batches(offers):
    torch.manual_seed(0)
    models = [torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)]
    here = models[0].to("cuda")
    assert offers == [256 * 256 * 4]  # the bias is smaller than `MIN_OFFER_BYTES`
    optimizer = torch.optim.SGD(here.parameters(), 0.1)
    for _ in range(100):
        batch = torch.randn(64, 256).to("cuda")
        optimizer.zero_grad()
        here(batch).square().mean().backward()
        optimizer.step()
    assert MIN_OFFER_BYTES <= 64 * 256 * 4 and MOST_REFILLS <= len(offers) < 2 * MOST_REFILLS
    reference = torch.nn.Linear(256, 256)
    reference.load_state_dict(here.cpu().state_dict())
    assert all(torch.isfinite(p).all() for p in reference.parameters())
