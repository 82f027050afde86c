"""Which rank of which program a process is, by the variables of its launcher."""

import os

import pytest
from wooly import ranks

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
CLUSTER = TORCHRUN | {"MASTER_ADDR": "node0", "LOCAL_WORLD_SIZE": "2"}


def test_rank_of_torchrun_has_its_number_and_those_of_its_machine():
    found = ranks.own(TORCHRUN)
    assert (found.rank, found.size, found.here) == (1, 4, 4)
    assert ranks.own(CLUSTER).here == 2


def test_ranks_of_one_program_have_one_id_and_other_programs_another():
    mine = ranks.own(TORCHRUN).gang_id
    assert ranks.own(TORCHRUN | {"RANK": "3"}).gang_id == mine
    for change in (
        {"MASTER_PORT": "29501"},
        {"TORCHELASTIC_RESTART_COUNT": "1"},
        {"TORCHELASTIC_RUN_ID": "x"},
        {"WORLD_SIZE": "5"},
        {ranks.VARIABLE: "another wooly run"},
    ):
        assert ranks.own(TORCHRUN | change).gang_id != mine


def test_ranks_on_several_machines_have_one_id_whatever_started_them():
    assert ranks.own(CLUSTER | {ranks.VARIABLE: "a"}).gang_id == ranks.own(CLUSTER | {ranks.VARIABLE: "b"}).gang_id


def test_local_programs_of_other_launchers_are_apart(monkeypatch):
    mine, parent = ranks.own(TORCHRUN).gang_id, os.getppid()  # in a container, this may be 1
    monkeypatch.setattr(os, "getppid", lambda: parent + 1)
    assert ranks.own(TORCHRUN).gang_id != mine
    named = TORCHRUN | {ranks.VARIABLE: "wooly run"}
    here = ranks.own(named).gang_id
    monkeypatch.setattr(os, "getppid", lambda: parent + 2)
    assert ranks.own(named).gang_id == here


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": ""},
        {"RANK": "4"},
        {"RANK": "-1"},
        {"RANK": "²"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "many"},
        {"WORLD_SIZE": "9" * 99},
    ],
)
def test_process_without_usable_variables_is_no_rank(change):
    assert ranks.own(TORCHRUN | change) is None


def test_process_of_mp_spawn_is_the_rank_that_its_parent_said(monkeypatch):
    said = ranks.Rank(ranks.new_id(), 2, 3, 3)
    monkeypatch.setattr(ranks, "spawned", said)
    assert ranks.own({}) == said
