"""Syntax of subjects and inboxes."""

import re
from pathlib import Path

import pytest
from wooly_bus import contracts, subjects

ROOT = Path(__file__).parents[3]
GRAMMAR = re.compile(r"wooly\.v1\.(rpc|cmd|evt)\.[a-z]+\.[a-z]+\.[a-z]+(\.[^.*>\s]+)?")


@pytest.mark.parametrize("bad", ["", "a.b", "*", ">", "a b", "a\n", "a\u2003b"])
def test_id_token_invalid_is_refused(bad):
    with pytest.raises(ValueError, match="subject"):
        contracts.EXECUTOR_SESSION_OPEN.at(bad)


def test_inbox_of_other_form_is_refused():
    assert subjects.inbox("_INBOX.aB3.x_-") == "_INBOX.aB3.x_-"
    for bad in (
        "",
        "_INBOX",
        "_INBOX.",
        "_INBOX.>",
        "_INBOX.a.*",
        "_INBOX.a b",
        "_INBOX.a\n",
        contracts.ROUTER_NODE_LIST.subject,
    ):
        with pytest.raises(ValueError, match="inbox"):
            subjects.inbox(bad)


def test_tenant_token_of_any_name_is_unique():
    names = ["a", "a.b", "a*", ">", "a b", "%", "a%2Eb", "ü\n"]
    subjects_ = {contracts.ROUTER_TASK_CHANGED.at(n).subject for n in names}
    assert len(subjects_) == len(names) and all(GRAMMAR.fullmatch(s) for s in subjects_)


@pytest.mark.parametrize("tenant", ["acme", "a.b", "ü *>", "%2E", "a b"])
def test_tenant_subjects_and_inboxes_are_separate(tenant):
    subject = contracts.ROUTER_TASK_LIST.for_tenant(tenant)
    head, _, token = subject.rpartition(".")
    assert head == contracts.ROUTER_TASK_LIST.subject and subjects.tenant_of(token) == tenant
    assert subjects.template(subject) == contracts.ROUTER_TASK_LIST.subject and not re.search(r"[*>\s]", token)
    inbox = subjects.client_inbox(tenant, "u1")
    assert subjects.inbox(inbox + ".x.y") and subjects.is_inbox_of(inbox + ".x", tenant)
    assert not subjects.is_inbox_of(inbox + ".x", tenant + "2") and not subjects.is_inbox_of(inbox[:-4], tenant)
    tunnel = subjects.tunnel_inbox(inbox + ".x")
    assert subjects.inbox(tunnel + ".y") and not subjects.is_inbox_of(tunnel + ".y", tenant)
    assert tunnel != subjects.tunnel_inbox(subjects.client_inbox(tenant, "u2"))


def test_tunnel_inbox_without_user_raises():
    for wrong in ("_INBOX.x", "_INBOX.tunnel.x", "wooly.v1.rpc", "_INBOX." + "a" * 32):
        with pytest.raises(ValueError, match="not an inbox of a tenant's user"):
            subjects.tunnel_inbox(wrong)
