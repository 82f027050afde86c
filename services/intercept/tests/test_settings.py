"""Settings: where they come from, what is refused, and that the README's table is theirs."""

from pathlib import Path

import pytest
from wooly.settings import ENV_PREFIX, Settings, documentation_table

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """No variables, an empty configuration folder."""
    import os

    for name in [n for n in os.environ if n.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def test_defaults(clean):
    found = Settings()
    assert (found.priority, found.gpu_count, found.gpu_mode, found.swap_from_vram) == (2, 1, "shared", True)


def test_environment_wins_over_the_file_and_arguments_over_both(clean, monkeypatch):
    (clean / "wooly").mkdir()
    (clean / "wooly/config").write_text('priority = 3\ntenant = "blue"\nnode_groups = "a, b"\n')
    assert (Settings().priority, Settings().tenant, Settings().node_groups) == (3, "blue", ("a", "b"))
    monkeypatch.setenv("WOOLYAI_PRIORITY", "0")
    monkeypatch.setenv("WOOLYAI_SWAP_FROM_VRAM", "0")
    assert (Settings().priority, Settings().tenant, Settings().swap_from_vram) == (0, "blue", False)
    assert Settings(priority=4).priority == 4


@pytest.mark.parametrize(
    ("variable", "value"),
    [("PRIORITY", "5"), ("GPU_COUNT", "0"), ("GPU_MODE", "both"), ("DEDUP", "yes"), ("REQUIRED_VRAM", "-1")],
)
def test_value_out_of_range_is_refused_by_name(clean, monkeypatch, variable, value):
    monkeypatch.setenv(ENV_PREFIX + variable, value)
    with pytest.raises(ValueError, match=variable.lower()):
        Settings()


def test_unknown_name_in_the_file_is_refused(clean):
    (clean / "wooly").mkdir()
    (clean / "wooly/config").write_text("priorty = 3\n")
    with pytest.raises(ValueError, match="priorty"):
        Settings()


def test_readme_has_the_table():
    assert documentation_table() in (REPOSITORY / "README.md").read_text()
