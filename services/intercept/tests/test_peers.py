"""What executors are told about the executors of a group's other ranks."""

import json

import pytest
from wooly.distributed.peers import LEAST_SHARE, introductions
from wooly_wis.collectives import MAX_SHARES, share_of

GROUP = b"sixteen bytes id"


def told(executors, rank, *, known=(), old=()):
    """The GROUP frames of a rank. `executors`: names by rank; those in `old` cannot divide groups."""
    places = [{"instance": name, "shares": name not in old, "rank": k} for k, name in enumerate(executors)]
    asked = []

    def introduce(there, group):
        asked.append(there["rank"])
        return json.dumps({"group": group.hex(), "instance": there["instance"], "ticket": "t"}).encode()

    found = [json.loads(raw) for raw in introductions(places, rank, GROUP, set(known), introduce)]
    return found, asked


def share(k):
    return share_of(GROUP, k).hex()


def test_each_rank_is_led_to_all_other_executors_and_told_who_carries_what():
    carriers = {"group": GROUP.hex(), "carriers": [0, 1, 0, 2], "least": LEAST_SHARE}
    found, asked = told("abac", 0)
    assert [(f["group"], f["instance"]) for f in found[:-1]] == [(share(1), "b"), (share(2), "c")]
    assert found[-1] == carriers and asked == [1, 3]
    found, asked = told("abac", 3)
    assert [(f["group"], f["instance"]) for f in found[:-1]] == [(share(0), "a"), (share(1), "b")]
    assert found[-1] == carriers and asked == [0, 1]


def test_executor_that_is_known_needs_no_ticket():
    found, asked = told("abac", 0, known={"b"})
    assert found[0] == {"group": share(1), "instance": "b"} and asked == [3]


def test_ranks_at_one_executor_tell_it_nothing():
    assert told("aaa", 1) == ([], [])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_first_executor_carries_everything_if_an_executor_cannot_divide_groups(rank):
    found, asked = told("abc", rank, old={"c"})
    assert [(f["group"], f["instance"]) for f in found] == [(GROUP.hex(), "a")] * (rank > 0) and asked == [0] * (
        rank > 0
    )


def test_group_at_more_executors_than_can_carry_shares_is_divided_among_the_first_ones():
    executors = [str(k) for k in range(MAX_SHARES + 2)]
    found, asked = told(executors, MAX_SHARES + 1)
    assert asked == list(range(MAX_SHARES))
    assert found[-1]["carriers"] == [*range(MAX_SHARES), 0, 1]
