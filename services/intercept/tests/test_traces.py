"""Traces: the spans of the client, and the waterfall that the command line prints."""

import io
import logging
import sys

from opentelemetry import trace
from rich.console import Console
from wooly.cli.traces import bar, in_order, print_trace
from wooly.errors import WoolyError
from wooly.traces import ClientTrace
from wooly_wis.traces import SpanInfo

WIDTH = 40


def span(name, parent=None, start=0, end=100, **more):
    values = {"service": "router", "error": False, "attributes": {}} | more
    return SpanInfo(span_id=name, parent_id=parent, name=f"s.{name}", start_ns=start, end_ns=end, **values)


def drawn(spans):
    return [(depth, s.span_id) for depth, s in in_order(spans)]


def test_in_order_children_follow_parents_by_start():
    spans = [span("b", "a", 20), span("d", "b", 30), span("c", "a", 10), span("a", None, 0)]
    assert drawn(spans) == [(0, "a"), (1, "c"), (1, "b"), (2, "d")]


def test_in_order_missing_parent_is_top_and_cycle_is_listed_once():
    assert drawn([span("a", "gone", 5), span("b", "b", 1)]) == [(0, "b"), (0, "a")]
    assert drawn([span("a", "b", 5), span("b", "c", 6), span("c", "a", 7)]) == [(0, "a"), (1, "c"), (2, "b")]


def test_in_order_deep_chain_does_not_recurse():
    count = sys.getrecursionlimit() + 50
    spans = [span(str(i), str(i - 1), i) for i in range(1, count + 1)]
    assert [d for d, _ in drawn(spans)] == list(range(count))
    shown = io.StringIO()
    print_trace(Console(file=shown, width=100), "a" * 32, spans, False)
    assert f"{count} spans" in shown.getvalue()


def test_bar_is_visible_and_inside_width():
    whole = span("a", None, 0, 1000)
    assert bar(whole, 0, 1000, WIDTH) == "━" * WIDTH
    for start, end in ((0, 0), (1000, 1000), (999, 1000), (500, 501)):
        found = bar(span("x", None, start, end), 0, 1000, WIDTH)
        assert found.count("━") >= 1 and len(found) <= WIDTH
    assert bar(span("x", None, 7, 7), 7, 7, WIDTH) == "━"


def test_print_trace_shows_errors_and_escapes_names():
    shown = io.StringIO()
    spans = [span("a", None, error=True, attributes={"error.message": "[bold]boom[/]"}), span("[red]b", "a")]
    print_trace(Console(file=shown, width=120), "a" * 32, spans, False)
    assert "failed: s.a [bold]boom[/]" in shown.getvalue() and "s.[red]b" in shown.getvalue()


class Controller:
    def __init__(self, fails=False):
        self.asked, self.fails = [], fails

    def ask(self, rpc, message, timeout):
        if self.fails:
            raise WoolyError("away")
        self.asked.append(message)


def test_client_trace_has_own_provider_and_root():
    before = trace.get_tracer_provider()
    mine = ClientTrace("session")
    with mine.step("connect", executor="e") as parent:
        assert parent.split("-")[1] == mine.trace_id
    assert not trace.get_current_span().get_span_context().is_valid
    mine.end()
    controller = Controller()
    mine.send(controller, "task", "secret")
    ((connect, root),) = [m.spans for m in controller.asked]
    assert (root.name, connect.name) == ("client.session", "client.connect") and connect.parent_id == root.span_id
    assert controller.asked[0].credential == "secret" and trace.get_tracer_provider() is before


def test_send_refused_spans_raises_nothing_and_shows_no_message_of_level_info(caplog):
    mine = ClientTrace("session")
    mine.end("OSError")
    with caplog.at_level(logging.DEBUG, logger="wooly"):
        mine.send(Controller(fails=True), "task", "")
    (record,) = caplog.records
    assert "did not accept the spans" in record.message
    assert record.levelno == logging.DEBUG


def test_client_trace_with_opentelemetry_disabled_sends_nothing(monkeypatch):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    mine = ClientTrace("session")
    with mine.step("connect") as parent:
        assert parent == "" == mine.trace_id
    mine.end()
    controller = Controller()
    mine.send(controller, "task", "")
    assert controller.asked == []
