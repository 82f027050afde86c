"""Tests of the counting of waits: the network's part, and the lines of the script."""

import types

import pytest
import torch
from wooly import api, waits
from wooly.cli.commands import run
from wooly.link import Link
from wooly.waits import FURTHER, Waits, top
from wooly_wis.frames import Kind


def test_wait_counts_as_the_networks_for_at_most_the_shortest_round_trip():
    found = Waits()
    found.answered(0.5, asked=True)
    assert (found.trip_s, found.network_s) == (0.5, 0.5)
    found.answered(0.02, asked=True)
    found.answered(1.0, asked=True)  # the device computed
    assert found.trip_s == 0.02 and found.network_s == pytest.approx(0.54) and found.waiting_s == pytest.approx(1.52)


def test_wait_for_an_older_question_is_no_bound_of_the_round_trip():
    found = Waits()
    found.answered(0.08, asked=True)
    found.answered(0.001, asked=False)
    assert found.trip_s == 0.08 and found.network_s == pytest.approx(0.081)


def test_large_answers_and_sends_count_as_the_networks():
    found = Waits()
    found.answered(0.1, asked=True)
    found.answered(2.0, 1.5, asked=True)
    found.answered(1.0, 5.0, asked=True)  # never more than the wait
    found.sent(3.0)
    assert found.network_s == pytest.approx(0.1 + 1.6 + 1.0 + 3.0)


def test_waits_are_counted_by_line():
    found = [Waits(), Waits()]
    for _ in range(3):
        found[0].answered(0.1, asked=True)
    found[1].sent(5.0)
    longest, second = top(found)
    assert (longest["waits"], longest["network_s"]) == (1, 5.0)
    assert (second["waits"], second["network_s"]) == (3, pytest.approx(0.3))
    assert all(
        f"{__file__}:" in line["line"] and "test_waits_are_counted" in line["line"] for line in (longest, second)
    )


def test_no_wait_for_an_executor_on_this_machine_is_the_networks():
    found = Waits()
    found.near = True
    found.answered(0.5, 0.4, asked=True)
    found.sent(2.0)
    assert (found.network_s, found.waiting_s, found.trip_s) == (0.0, 2.5, 0.5)
    assert [line["waiting_s"] for line in top([found])] == [2.0, 0.5]


def test_lines_above_the_limit_are_counted_together(monkeypatch):
    monkeypatch.setattr(waits, "MOST_LINES", 1)
    found = Waits()
    found.sent(1.0)
    found.sent(2.0)
    found.sent(4.0)
    assert [(line["line"] == FURTHER, line["network_s"]) for line in top([found])] == [(True, 6.0), (False, 1.0)]


@pytest.mark.connected
def test_session_names_the_line_that_reads(cuda):
    link = api.attached_links()[0]
    link.waits = Waits()
    x = torch.ones(4, device="cuda")
    for _ in range(3):
        x.add_(1).sum().item()
    torch.zeros(1 << 16, device="cuda").copy_(torch.ones(1 << 16))
    stats = api._stats(types.SimpleNamespace(device=api.attached_device(), links=[link], parts=[api.Part(())],
                                             endpoints=[""], started=0.0))  # fmt: skip
    reading = [line for line in stats["lines"] if line["waits"] == 3]
    assert reading and "test_session_names_the_line_that_reads" in reading[0]["line"]
    assert 0 < stats["trip_s"] <= stats["network_s"] <= stats["waiting_s"]
    assert set(stats) >= {"seconds", "operations", "devices"}


@pytest.mark.connected
def test_answer_to_a_cut_that_arrived_before_is_no_bound_of_the_round_trip(cuda):
    """Every session that can go on elsewhere asks for cuts, and takes their answers in later."""
    link = api.attached_links()[0]
    link.waits = Waits()
    link.send(Kind.SYNC)
    cut = link.connection.channel.expect_frame()
    link.sync()
    assert cut.done
    trip_s = link.waits.trip_s = 0.02
    link.continuation.cut_if_due(types.SimpleNamespace(answer=cut, over=False, alone=True, given_up="", due=False,
                                                       taken=lambda answer: None))  # fmt: skip
    assert link.waits.trip_s == trip_s


def _printed(sessions, monkeypatch):
    lines = []
    monkeypatch.setattr(run, "err", types.SimpleNamespace(print=lambda text, **options: lines.append(text)))
    run._print_network(sessions)
    return lines


def test_end_of_a_run_names_the_lines_that_waited_for_the_network(monkeypatch):
    line = {"line": "/a/train.py:3 in <module>", "waits": 2, "waiting_s": 0.7, "network_s": 0.5}
    stats = {
        "network_s": 0.6,
        "waiting_s": 1.0,
        "trip_s": 0.08,
        "lines": [line, line | {"line": "b", "network_s": 0.0}],
    }
    head, only = _printed([stats, stats], monkeypatch)
    assert "waited 2.0 s, 1.2 s of it for the network (round trip 80 ms)" in head
    assert "1.0 s in 4 waits: /a/train.py:3 in <module>" in only


def test_end_of_a_run_near_its_device_says_nothing_about_the_network(monkeypatch):
    assert _printed([{"network_s": 0.01, "waiting_s": 5.0, "trip_s": 1e-4, "lines": []}, {}], monkeypatch) == []


def test_small_content_is_offered_only_over_a_short_connection(monkeypatch):
    from wooly.contents import upload

    calls = []
    link = types.SimpleNamespace(
        waits=Waits(),
        offer=lambda buffer, n, name, head: bool(calls.append("offer")),
        write=lambda buffer, at, data: calls.append("write"),
        seal=lambda buffer, n, name: calls.append(name),
        keep_content=Link.keep_content,
    )
    data = memoryview(bytes(range(256)) * 1024)
    for link.waits.trip_s in (1e-4, 0.08):
        upload(link, 1, data)
    assert calls[:2] == ["offer", "write"] and calls[3] == "write" and len(calls) == 5
    assert calls[2] == calls[4]  # sealed with the same digest
