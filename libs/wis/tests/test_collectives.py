"""The payload of COLLECTIVE frames: what is written is read back, and what is malformed is refused."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wooly_wis.collectives import (
    MAX_RANGES,
    MAX_RANKS,
    Collective,
    CollectiveReader,
    Range,
    Reduction,
    What,
    group_of,
    pack_collective,
    unpack_collective,
    with_group,
    with_sequence,
)
from wooly_wis.dtypes import DType
from wooly_wis.errors import DecodeError

GROUP = bytes(range(16))
ALL_REDUCE = Collective(
    *(GROUP, 7, 1, 3, 60_000, What.ALL_REDUCE, DType.F32),
    *((Range(1, 0, 4),), (Range(1, 0, 4),), Reduction.SUM, 0, 1.0, "train.py:3 in step"),
)
EXCHANGE = dataclasses.replace(
    ALL_REDUCE, what=What.EXCHANGE, sequence=0, reduction=Reduction.NONE, reads=(Range(1, 0, 4, 2),), writes=()
)


@pytest.mark.parametrize("sent", [ALL_REDUCE, EXCHANGE], ids=["all_reduce", "exchange"])
@pytest.mark.parametrize("recovers", [True, False])
@pytest.mark.parametrize("fault", ["", "its operand is too large"])
def test_collective_packed_and_unpacked_is_the_same(sent, recovers, fault):
    sent = dataclasses.replace(sent, recovers=recovers, fault=fault)
    assert unpack_collective(pack_collective(sent)) == sent


def test_frame_with_another_group_is_otherwise_the_same():
    other = with_group(pack_collective(ALL_REDUCE), bytes(16))
    assert group_of(other) == bytes(16) and group_of(pack_collective(ALL_REDUCE)) == GROUP
    assert unpack_collective(other) == dataclasses.replace(ALL_REDUCE, group=bytes(16))


def test_frame_with_another_number_is_otherwise_the_same():
    assert with_sequence(pack_collective(ALL_REDUCE), 9) == pack_collective(dataclasses.replace(ALL_REDUCE, sequence=9))


def outcome(unpack, payload):
    try:
        return unpack(payload)
    except DecodeError as e:
        return str(e)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([ALL_REDUCE, EXCHANGE, dataclasses.replace(ALL_REDUCE, rank=2, fault="it is too large")]),
            st.sampled_from([0, 1, 2, 1 << 63]),
            st.sampled_from([GROUP, bytes(16)]),
            st.sampled_from([0, 0, 0, 1, 77, 500]),
        ),
        max_size=12,
    )
)
def test_reader_unpacks_frames_that_come_again_like_new_ones(frames):
    reader = CollectiveReader()
    for sent, sequence, group, cut in frames:
        payload = with_group(with_sequence(pack_collective(sent), sequence), group)
        payload = payload[: len(payload) - cut] if cut else payload
        assert outcome(reader.unpack, payload) == outcome(unpack_collective, payload)


def test_reader_remembers_few_small_frames():
    reader = CollectiveReader()
    for timeout in range(1, 2000):
        reader.unpack(pack_collective(dataclasses.replace(ALL_REDUCE, timeout_ms=timeout)))
    many = dataclasses.replace(EXCHANGE, reads=EXCHANGE.reads * MAX_RANGES)
    assert reader.unpack(pack_collective(many)) == many
    assert len(reader._known) <= 256 and max(map(len, reader._known)) <= 1024


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"size": 0}, "ranks"),
        ({"size": MAX_RANKS + 1}, "a group has 1 to 1024 ranks"),
        ({"rank": 3}, "rank 3"),
        ({"root": 3}, "root 3"),
        ({"timeout_ms": 0}, "timeout"),
        ({"timeout_ms": (1 << 64) - 1}, "timeout"),
        ({"sequence": 0}, "sequence number 0"),
        ({"reduction": Reduction.NONE}, "reduction NONE"),
        ({"dtype": DType.C64}, "c64 cannot be reduced"),
        ({"dtype": DType.BOOL, "reduction": Reduction.AVG}, "not defined for bool"),
        ({"factor": 2.0}, "factor"),
        ({"reduction": Reduction.PREMUL_SUM, "factor": float("nan")}, "finite factor"),
        ({"reads": ()}, "reads 0 ranges"),
        ({"writes": (Range(1, 0, 5),)}, "as many elements"),
        ({"what": What.ALL_GATHER, "reduction": Reduction.NONE}, "writes 1; expected"),
        ({"what": What.BARRIER, "reduction": Reduction.NONE}, "reads 1 ranges"),
        ({"what": What.LEAVE, "reduction": Reduction.NONE}, "sequence number"),
        ({"what": What.EXCHANGE, "reduction": Reduction.NONE, "sequence": 0, "reads": ()}, None),
        ({"reads": (Range(1, 0, 1),) * (MAX_RANGES + 1)}, "the limits are"),
    ],
)
def test_collective_whose_parts_do_not_fit_is_refused(change, error):
    sent = dataclasses.replace(ALL_REDUCE, **change)
    if error is None:
        assert unpack_collective(pack_collective(sent)) == sent
    else:
        with pytest.raises(DecodeError, match=error):
            unpack_collective(pack_collective(sent))


@pytest.mark.parametrize("peer", [1, 3, 1 << 31])
def test_exchange_with_itself_or_an_unknown_rank_is_refused(peer):
    sent = dataclasses.replace(EXCHANGE, reads=(Range(1, 0, 4, peer),))
    with pytest.raises(DecodeError, match="cannot exchange data"):
        unpack_collective(pack_collective(sent))


@given(cut=st.integers(0, 400), at=st.integers(0, 200), byte=st.integers(0, 255))
def test_collective_truncated_or_changed_is_refused_or_valid(cut, at, byte):
    raw = bytearray(pack_collective(ALL_REDUCE))
    raw[at % len(raw)] = byte
    for payload in (bytes(raw), bytes(raw[:cut])):
        try:
            found = unpack_collective(payload)
        except DecodeError:
            continue
        assert pack_collective(found)[: len(payload)] == payload or "\ufffd" in found.origin
