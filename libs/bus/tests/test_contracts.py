"""The table of contracts: all lines have one form, and each contract is in use."""

import re
from pathlib import Path

import pytest
from wooly_bus import contracts, subjects
from wooly_bus.app import ServiceApp
from wooly_bus.contract_types import AddressedEvent, AddressedRpc, Event, Log, Rpc, WorkQueue
from wooly_bus.errors import EnvelopeError
from wooly_wis.messages import CloseSessionReply, CloseSessionRequest, Message

ROOT = Path(__file__).parents[3]
TABLE = contracts.RPCS | contracts.EVENTS
GRAMMAR = re.compile(
    r"wooly\.v1\.(rpc|cmd|evt)\.([a-z]+|\{service\})\.[a-z]+\.[a-z]+(\.\{(executor_id|family|tenant)\})?"
)
SOURCES = [p for d in ("libs", "services", "deploy") for p in (ROOT / d).glob("**/src/**/*.py")]


@pytest.mark.parametrize("name", TABLE)
def test_contract_has_a_subject_of_the_grammar_that_names_it(name):
    contract = TABLE[name]
    assert GRAMMAR.fullmatch(contract.template)
    kind, *rest = contract.template.split(".")[2:6]
    assert kind in (("rpc", "cmd") if name in contracts.RPCS else ("evt", "cmd"))
    named = "_".join(rest).replace("{", "").replace("}", "").upper()
    assert name == named or name == "ROUTER_JOB_COMMAND"
    assert bool(contract.parameter) == isinstance(contract, AddressedRpc | AddressedEvent)
    assert contract.about.endswith(".")


@pytest.mark.parametrize("name", [n for n, c in TABLE.items() if isinstance(c, AddressedRpc | AddressedEvent)])
def test_address_takes_the_place_of_the_parameter(name):
    contract = TABLE[name]
    subject = contract.at("host-0").subject
    assert subjects.matches(contract.pattern, subject) and "{" not in subject
    if not contract.template.endswith("}"):
        return
    assert subjects.template(subject) == subject.removesuffix(".host-0")


@pytest.mark.parametrize("name", contracts.RPCS)
def test_message_of_a_contract_is_a_control_message(name):
    rpc = contracts.RPCS[name]
    assert issubclass(rpc.request, Message) and issubclass(rpc.reply, Message)
    assert rpc.request is not rpc.reply
    assert not rpc.tenants_only or rpc.scope is not None


def test_stream_is_named_by_kind_and_service_and_keeps_one_event():
    streams = [event.stream for event in contracts.EVENTS.values() if event.stream is not None]
    names = [stream.name for stream in streams]
    assert len(names) == 6 and len(set(names)) == len(names)
    assert all(re.fullmatch(r"WOOLY_(CMD|EVT)_[A-Z]+", name) for name in names)
    assert {type(stream) for stream in streams} == {Log, WorkQueue}


def test_subject_strings_live_in_the_table_only():
    assert len(SOURCES) > 20
    offenders = [
        str(p)
        for p in SOURCES
        if p.name not in ("contracts.py", "subjects.py")
        and re.search(r"wooly\.v1\.|PREFIX\}?\.(rpc|cmd|evt)\.[a-z]", p.read_text())
    ]
    assert offenders == []


def test_every_contract_is_served_or_used_as_it_says():
    """A contract that no service serves, publishes or hears is left over."""
    text = "\n".join(p.read_text() for p in SOURCES if p.name != "contracts.py")
    for name, contract in TABLE.items():
        served = re.findall(rf"\.serve(?:_tenants)?\(\s*contracts\.{name}\b", text)
        used = re.findall(rf"contracts\.{name}\b", text)
        if name in contracts.RPCS:
            assert served, f"{name} is served nowhere"
            tenants = [s for s in served if "serve_tenants" in s]
            assert bool(tenants) == (contract.scope is not None), name
            assert (len(served) > len(tenants)) != contract.tenants_only, name
        else:
            assert used and not served, name


def test_event_of_all_services_is_heard_by_one_pattern():
    assert contracts.SERVICE_SPAN_RECORDED.pattern == "wooly.v1.evt.*.span.recorded"
    subject = contracts.SERVICE_SPAN_RECORDED.at("router").subject
    assert subject == "wooly.v1.evt.router.span.recorded"
    assert contracts.SERVICE_SPAN_RECORDED.address_of(subject) == "router"


def test_address_of_a_subject_is_what_was_put_there():
    event = contracts.EXECUTOR_DISPATCH_JOURNALED
    assert event.address_of(event.at("host-0").subject) == "host-0"


def test_event_of_bytes_is_not_decoded_and_event_of_a_model_is():
    journaled = contracts.EXECUTOR_DISPATCH_JOURNALED.at("x")
    assert journaled.decoded(journaled.encoded(b"\x00\xff")) == b"\x00\xff"
    event = Event("wooly.v1.evt.test.thing.happened", CloseSessionRequest)
    said = CloseSessionRequest(session_id="a")
    assert event.decoded(event.encoded(said)) == said
    with pytest.raises(EnvelopeError, match="not a CloseSessionRequest"):
        event.decoded(b"{}")


def test_event_without_a_stream_has_no_stream_name():
    with pytest.raises(ValueError, match="no stream keeps the events of wooly"):
        _ = contracts.EXECUTOR_NODE_HEARTBEAT.stream_name


def test_contract_without_a_scope_is_not_served_to_tenants_and_one_for_tenants_only_to_nobody_else():
    async def handler(*_):
        return CloseSessionReply(closed=True)

    app = ServiceApp("test", "nats://127.0.0.1:9")
    subject = "wooly.v1.rpc.test.thing.ask"
    with pytest.raises(ValueError, match="names no scope"):
        app.serve_tenants(Rpc(subject, CloseSessionRequest, CloseSessionReply), handler)
    only = Rpc(subject, CloseSessionRequest, CloseSessionReply, scope="tasks:write", tenants_only=True)
    with pytest.raises(ValueError, match="tenants' clients only"):
        app.serve(only, handler)


def spelled_out(text):
    """`a.{b, c}.d` as `a.b.d` and `a.c.d`."""
    found = re.fullmatch(r"([^{]*)\{([^}]*)\}(.*)", text)
    return [f"{found[1]}{one.strip()}{found[3]}" for one in found[2].split(",")] if found else [text]


def test_subject_in_a_readme_or_decision_is_in_the_table():
    known = {contract.pattern for contract in TABLE.values()}
    known |= {f"{rpc.pattern}.*" for rpc in contracts.RPCS.values() if rpc.scope is not None}
    pages = [*ROOT.glob("*/*/README.md"), *ROOT.glob("docs/**/*.md"), ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"]
    named = [
        (page.relative_to(ROOT), subject)
        for page in pages
        for quoted in re.findall(r"`(wooly\.v1\.[a-z][^`]*)`", page.read_text())
        for subject in spelled_out(re.sub(r"\s+", " ", quoted))
    ]
    assert len(named) > 50
    unknown = [
        (str(page), subject)
        for page, subject in named
        if not {pattern := re.sub(r"<\w+>", "*", subject), f"{pattern}.*"} & known
    ]
    assert unknown == []
