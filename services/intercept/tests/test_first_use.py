"""The first use of a device opens the session, in whatever thread; another thread may close the session meanwhile."""

import threading
from types import SimpleNamespace

from wooly import api, children
from wooly_testkit import forks


def test_disable_waits_for_no_operation_while_it_holds_the_lock_of_the_session(monkeypatch):
    """A first use holds the lock of its device and waits for the lock of the session."""
    recorder = SimpleNamespace(lock=threading.RLock(), link=None, forget_session=lambda: None)
    closed, began = threading.Event(), threading.Event()
    link = SimpleNamespace(siblings=[], await_collectives=lambda: None, say_end=lambda why: closed.set(), shares=False)
    link.hang_up = lambda known: None
    holder = SimpleNamespace(devices=SimpleNamespace(recorders=(recorder,), active=lambda: (recorder,)))
    monkeypatch.setattr(api, "_attached", api._Attached(holder, [link], [api.Part(())], []))
    monkeypatch.setattr(api, "_facade", SimpleNamespace(uninstall=began.set))
    monkeypatch.setattr(api, "_pending", None)
    monkeypatch.setattr(children, "settings", None)
    monkeypatch.setattr(
        api, "register", lambda: SimpleNamespace(set_opener=lambda opener: None, devices=SimpleNamespace())
    )
    other = threading.Thread(target=api.disable)
    with recorder.lock:
        other.start()
        assert began.wait(60)
        assert api._lock.acquire(timeout=60)
        api._lock.release()
        assert not closed.is_set()
    other.join(60)
    assert closed.is_set() and not api.has_session()


HIDDEN = """
from wooly import api
from wooly.settings import Settings
api.enable(Settings())
try:
    api.attached_links()
except api.WoolyError as e:
    print(e)
"""


def test_session_with_all_devices_hidden_error_names_the_variable(tmp_path):
    (tmp_path / "hidden.py").write_text(HIDDEN)
    env = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tmp_path)}
    said = forks.run("hidden", like="wooly", env=env, timeout=100)
    assert "no session is open. No CUDA GPUs are available: CUDA_VISIBLE_DEVICES=''" in said.stdout, said.stderr
