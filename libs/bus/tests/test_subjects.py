"""Subjects: one grammar, one place."""

import re
from pathlib import Path

import pytest
from wooly_bus import subjects

ROOT = Path(__file__).parents[3]
GRAMMAR = re.compile(r"wooly\.v1\.(rpc|cmd|evt)\.[a-z]+\.[a-z]+\.[a-z]+(\.[^.*>\s]+)?")
NAMES = {k: v for k, v in vars(subjects).items() if k.isupper() and k not in ("PREFIX", "INBOX") and isinstance(v, str)}
STREAMS = {k: v for k, v in NAMES.items() if k.endswith("_STREAM")}
CONSTANTS = {k: v for k, v in NAMES.items() if k not in STREAMS and "*" not in v}
FUNCTIONS = [
    subjects.executor_session_open,
    subjects.executor_session_renew,
    subjects.executor_session_close,
    subjects.executor_tunnel,
    subjects.executor_session_steer,
    subjects.executor_epoch_end,
    subjects.executor_journaled,
    subjects.executor_job_run,
    subjects.executor_job_ended,
    subjects.router_task_changed,
    subjects.executor_usage,
]


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant_subject_follows_the_grammar(name):
    assert GRAMMAR.fullmatch(CONSTANTS[name])
    assert subjects.template(CONSTANTS[name]) == CONSTANTS[name]


@pytest.mark.parametrize("name", STREAMS)
def test_stream_is_named_by_kind_and_service(name):
    assert re.fullmatch(r"WOOLY_(CMD|EVT)_[A-Z]+", STREAMS[name])


def test_journals_of_all_executors_are_those_of_each():
    assert subjects.executor_journaled("host-0") == subjects.EXECUTOR_JOURNALS.replace("*", "host-0")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_addressed_subject_follows_the_grammar_and_has_a_template(function):
    subject = function("host-0")
    assert GRAMMAR.fullmatch(subject) and subject.endswith(".host-0")
    assert subjects.template(subject) == subject.removesuffix(".host-0")


@pytest.mark.parametrize("bad", ["", "a.b", "*", ">", "a b", "a\n", "a\u2003b"])
def test_id_that_would_change_the_subject_is_refused(bad):
    with pytest.raises(ValueError, match="subject"):
        subjects.executor_session_open(bad)


def test_inbox_is_an_inbox_and_nothing_else():
    assert subjects.inbox("_INBOX.aB3.x_-") == "_INBOX.aB3.x_-"
    for bad in (
        "",
        "_INBOX",
        "_INBOX.",
        "_INBOX.>",
        "_INBOX.a.*",
        "_INBOX.a b",
        "_INBOX.a\n",
        subjects.ROUTER_NODE_LIST,
    ):
        with pytest.raises(ValueError, match="inbox"):
            subjects.inbox(bad)


def test_subject_strings_live_in_subjects_only():
    sources = [p for d in ("libs", "services", "deploy") for p in (ROOT / d).glob("**/src/**/*.py")]
    assert len(sources) > 20
    offenders = [str(p) for p in sources if p.name != "subjects.py" and "wooly.v1." in p.read_text(encoding="utf-8")]
    assert offenders == []


def test_tenant_of_any_name_has_one_token_of_its_own():
    names = ["a", "a.b", "a*", ">", "a b", "%", "a%2Eb", "ü\n"]
    subjects_ = {subjects.router_task_changed(n) for n in names}
    assert len(subjects_) == len(names) and all(GRAMMAR.fullmatch(s) for s in subjects_)


@pytest.mark.parametrize("tenant", ["acme", "a.b", "ü *>", "%2E", "a b"])
def test_tenant_has_subjects_and_inboxes_of_its_own(tenant):
    subject = subjects.for_tenant(subjects.ROUTER_TASK_LIST, tenant)
    head, _, token = subject.rpartition(".")
    assert head == subjects.ROUTER_TASK_LIST and subjects.tenant_of(token) == tenant
    assert subjects.template(subject) == subjects.ROUTER_TASK_LIST and not re.search(r"[*>\s]", token)
    inbox = subjects.client_inbox(tenant, "u1")
    assert subjects.inbox(inbox + ".x.y") and subjects.is_inbox_of(inbox + ".x", tenant)
    assert not subjects.is_inbox_of(inbox + ".x", tenant + "2") and not subjects.is_inbox_of(inbox[:-4], tenant)
    tunnel = subjects.tunnel_inbox(inbox + ".x")
    assert subjects.inbox(tunnel + ".y") and not subjects.is_inbox_of(tunnel + ".y", tenant)
    assert tunnel != subjects.tunnel_inbox(subjects.client_inbox(tenant, "u2"))


def test_tunnel_has_no_inbox_without_a_user():
    for wrong in ("_INBOX.x", "_INBOX.tunnel.x", "wooly.v1.rpc", "_INBOX." + "a" * 32):
        with pytest.raises(ValueError, match="no user's inbox"):
            subjects.tunnel_inbox(wrong)
