"""Settings: their sources, the errors for invalid settings, and the table in the documentation."""

from pathlib import Path

import pytest
from wooly.settings import ENV_PREFIX, Settings, SettingsError, documentation_table, load, unknown_variables

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """An environment without WOOLYAI_* variables and without a configuration file."""
    import os

    for name in [n for n in os.environ if n.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def test_defaults(clean):
    found = Settings()
    assert (found.priority, found.gpu_count, found.gpu_mode, found.swap_from_vram) == (2, 1, "shared", True)


def test_settings_precedence_is_arguments_environment_file(clean, monkeypatch):
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
def test_value_out_of_range_names_setting(clean, monkeypatch, variable, value):
    monkeypatch.setenv(ENV_PREFIX + variable, value)
    with pytest.raises(ValueError, match=variable.lower()):
        Settings()


def test_unknown_setting_in_file_is_refused(clean):
    (clean / "wooly").mkdir()
    (clean / "wooly/config").write_text("priorty = 3\n")
    with pytest.raises(ValueError, match="priorty"):
        Settings()


def test_load_invalid_variable_names_variable(clean, monkeypatch):
    monkeypatch.setenv(ENV_PREFIX + "GPU_COUNT", "many")
    with pytest.raises(SettingsError, match=r"^WOOLYAI_GPU_COUNT=many: input should be a valid integer"):
        load()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("priority = 9\n", "priority = 9: input should be less than or equal to 4"),
        ("priorty = 3\n", "unknown setting priorty (did you mean priority?)"),
    ],
)
def test_load_invalid_setting_names_file_and_setting(clean, text, said):
    file = clean / "wooly/config"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load()
    assert str(caught.value).startswith(f"{file}: {said}")


def test_load_invalid_toml_names_file_and_problem(clean):
    file = clean / "wooly/config"
    file.parent.mkdir()
    file.write_text("priority: 3\n")
    with pytest.raises(SettingsError) as caught:
        load()
    assert str(caught.value).startswith(f"cannot read the configuration file {file}: Expected '='")


def test_load_unknown_setting_hides_value(clean):
    (clean / "wooly").mkdir()
    (clean / "wooly/config").write_text('credentail = "wooly_secret"\n')
    with pytest.raises(SettingsError) as caught:
        load()
    assert "did you mean credential?" in str(caught.value) and "wooly_secret" not in str(caught.value)


def test_unknown_variables_suggest_closest_setting(clean, monkeypatch):
    assert unknown_variables() == []
    monkeypatch.setenv("WOOLYAI_GPUS_COUNT", "2")
    monkeypatch.setenv("WOOLYAI_PRIORITY", "2")
    monkeypatch.setenv("WOOLYAI_XYZZY", "2")
    assert unknown_variables() == ["WOOLYAI_GPUS_COUNT (did you mean WOOLYAI_GPU_COUNT?)", "WOOLYAI_XYZZY"]


def test_documentation_table_equals_settings_page():
    assert documentation_table() in (REPOSITORY / "docs/getting-started/settings.md").read_text()


def test_settings_other_name_of_dedup_is_understood(clean, monkeypatch):
    monkeypatch.setenv("WOOLYAI_WEIGHTS_DEDUP", "0")
    monkeypatch.setenv("WOOLYAI_GPU_IDS", "0")  # of executors
    assert load().dedup == "off" and unknown_variables() == []
    monkeypatch.setenv("WOOLYAI_DEDUP", "shared")
    assert load().dedup == "shared"
    monkeypatch.setenv("WOOLYAI_WEIGHTS_DEDUP", "maybe")
    with pytest.raises(SettingsError, match="WOOLYAI_WEIGHTS_DEDUP=maybe: use 0 or 1"):
        load()
