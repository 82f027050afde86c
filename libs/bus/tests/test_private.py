"""Private state folders; services without authentication on the network need explicit permission."""

import os
import stat

import pytest
from wooly_bus.private import keep_private
from wooly_bus.web import OPEN, is_loopback, refuse_open, shows


@pytest.fixture(autouse=True)
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def test_keep_private_new_folder_and_files_are_private(tmp_path):
    folder = tmp_path / "a" / "state"
    keep_private(folder)
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text("")
    assert [mode(p) for p in (folder, folder / "sub", folder / "sub" / "file")] == [0o700, 0o700, 0o600]


def test_keep_private_tightens_only_own_files(tmp_path):
    logs, other, outside = tmp_path / "logs", tmp_path / "other.txt", tmp_path / "outside"
    logs.mkdir(mode=0o755)
    for path in (logs / "x.log", tmp_path / "a.db", tmp_path / "a.db-wal", other, outside):
        path.write_text("")
    (logs / "link").symlink_to(outside)
    keep_private(tmp_path, "logs", "*.db*", "missing")
    assert [mode(p) for p in (logs, logs / "x.log", tmp_path / "a.db", tmp_path / "a.db-wal")] == [0o700, *[0o600] * 3]
    assert [mode(p) for p in (other, outside)] == [0o644, 0o644]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes folders of another user's")
def test_keep_private_folder_of_other_user_is_refused(tmp_path):
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    with pytest.raises(PermissionError, match="belongs to user 65534, who could replace the files in it"):
        keep_private(tmp_path / "theirs")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_refuse_open_loopback_is_allowed(host):
    assert is_loopback(host) and refuse_open("ROUTER", host, "") == ""


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.1.2.3", "localhost.example.org", "gpu7", "fe80::1", "127.0.0.1.nip.io"]
)
def test_refuse_open_network_needs_setting(host):
    assert "WOOLY_ROUTER_OPEN_TO_NETWORK" in refuse_open("ROUTER", host, "true")
    assert refuse_open("ROUTER", host, OPEN) == ""


def test_shows_compares_whole_token():
    assert shows("Bearer secret", "secret")
    assert not any(
        shows(header, "secret")
        for header in ("", "secret", "Bearer secre", "Bearer secrets", "Basic secret", "Bearer ü")
    )
