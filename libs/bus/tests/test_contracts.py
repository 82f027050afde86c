"""The table of contracts: consistent form, and each contract is in use."""

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
SOURCES = [p for d in ("libs", "services", "deploy", "integrations") for p in (ROOT / d).glob("**/src/**/*.py")]


@pytest.mark.parametrize("name", TABLE)
def test_contract_name_matches_its_subject(name):
    contract = TABLE[name]
    assert GRAMMAR.fullmatch(contract.template)
    kind, *rest = contract.template.split(".")[2:6]
    assert kind in (("rpc", "cmd") if name in contracts.RPCS else ("evt", "cmd"))
    named = "_".join(rest).replace("{", "").replace("}", "").upper()
    assert name == named or name == "ROUTER_JOB_COMMAND"
    assert bool(contract.parameter) == isinstance(contract, AddressedRpc | AddressedEvent)
    assert contract.about.endswith(".")


@pytest.mark.parametrize("name", [n for n, c in TABLE.items() if isinstance(c, AddressedRpc | AddressedEvent)])
def test_contract_at_replaces_parameter(name):
    contract = TABLE[name]
    subject = contract.at("host-0").subject
    assert subjects.matches(contract.pattern, subject) and "{" not in subject
    if not contract.template.endswith("}"):
        return
    assert subjects.template(subject) == subject.removesuffix(".host-0")


@pytest.mark.parametrize("name", contracts.RPCS)
def test_contract_models_are_control_messages(name):
    rpc = contracts.RPCS[name]
    assert issubclass(rpc.request, Message) and issubclass(rpc.reply, Message)
    assert rpc.request is not rpc.reply
    assert not rpc.tenants_only or rpc.scope is not None


def test_stream_name_has_kind_and_service_and_one_event():
    streams = [event.stream for event in contracts.EVENTS.values() if event.stream is not None]
    names = [stream.name for stream in streams]
    assert len(names) == 6 and len(set(names)) == len(names)
    assert all(re.fullmatch(r"WOOLY_(CMD|EVT)_[A-Z]+", name) for name in names)
    assert {type(stream) for stream in streams} == {Log, WorkQueue}


def test_subject_strings_are_only_in_table():
    assert len(SOURCES) > 20
    offenders = [
        str(p)
        for p in SOURCES
        if p.name not in ("contracts.py", "subjects.py")
        and re.search(r"wooly\.v1\.|PREFIX\}?\.(rpc|cmd|evt)\.[a-z]", p.read_text())
    ]
    assert offenders == []


def test_every_contract_is_used_as_declared():
    """A contract that no service serves, publishes or subscribes to is obsolete."""
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


def test_event_of_all_services_has_one_pattern():
    assert contracts.SERVICE_SPAN_RECORDED.pattern == "wooly.v1.evt.*.span.recorded"
    subject = contracts.SERVICE_SPAN_RECORDED.at("router").subject
    assert subject == "wooly.v1.evt.router.span.recorded"
    assert contracts.SERVICE_SPAN_RECORDED.address_of(subject) == "router"


def test_address_of_subject_returns_address():
    event = contracts.EXECUTOR_DISPATCH_JOURNALED
    assert event.address_of(event.at("host-0").subject) == "host-0"


def test_event_decodes_model_but_not_bytes():
    journaled = contracts.EXECUTOR_DISPATCH_JOURNALED.at("x")
    assert journaled.decoded(journaled.encoded(b"\x00\xff")) == b"\x00\xff"
    event = Event("wooly.v1.evt.test.thing.happened", CloseSessionRequest)
    said = CloseSessionRequest(session_id="a")
    assert event.decoded(event.encoded(said)) == said
    with pytest.raises(EnvelopeError, match="not a CloseSessionRequest"):
        event.decoded(b"{}")


def test_event_without_stream_name_raises():
    with pytest.raises(ValueError, match="no stream stores the events of wooly"):
        _ = contracts.EXECUTOR_NODE_HEARTBEAT.stream_name


def test_serve_checks_scope_and_tenants_only():
    async def handler(*_):
        return CloseSessionReply(closed=True)

    app = ServiceApp("test", "nats://127.0.0.1:9")
    subject = "wooly.v1.rpc.test.thing.ask"
    with pytest.raises(ValueError, match="has no scope"):
        app.serve_tenants(Rpc(subject, CloseSessionRequest, CloseSessionReply), handler)
    only = Rpc(subject, CloseSessionRequest, CloseSessionReply, scope="tasks:write", tenants_only=True)
    with pytest.raises(ValueError, match="only tenants' clients"):
        app.serve(only, handler)


def spelled_out(text):
    """`a.{b, c}.d` as `a.b.d` and `a.c.d`."""
    found = re.fullmatch(r"([^{]*)\{([^}]*)\}(.*)", text)
    return [f"{found[1]}{one.strip()}{found[3]}" for one in found[2].split(",")] if found else [text]


def test_subjects_in_documentation_are_in_table():
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
