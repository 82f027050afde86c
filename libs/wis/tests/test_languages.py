"""Languages of kernels: processes find them by entry point, errors name missing ones, and they are part of a compiler's
version.
"""

import inspect
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from wooly_wis import languages
from wooly_wis.artifact import compiler_version
from wooly_wis.foreign import LANGUAGES, OPAQUE
from wooly_wis.languages import (
    CLIENT,
    COMPILER,
    DISTRIBUTIONS,
    CompiledLanguage,
    ForeignError,
    MissingLanguageError,
    ReadLanguage,
)


def assert_offers(module, protocol, functions):
    """Assert that the module has these functions of the protocol, with the same parameters and results."""
    for name in functions:
        wanted, found = inspect.signature(getattr(protocol, name)), inspect.signature(getattr(module, name))
        assert [*found.parameters.values()] == [*wanted.parameters.values()][1:], name
        assert found.return_annotation == wanted.return_annotation, name


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(languages, "installed", lambda group: {})


def test_checkable_languages_have_an_installed_distribution():
    assert set(LANGUAGES) - OPAQUE == set(DISTRIBUTIONS) == set(languages.installed(COMPILER))
    assert set(languages.installed(CLIENT)) == {"cuda-c"}


@pytest.mark.parametrize("language", DISTRIBUTIONS)
def test_compiled_language_is_imported_at_first_request(language):
    assert_offers(languages.compiled(language), CompiledLanguage, ("for_cpu", "for_gpu"))


def test_read_language_is_imported_at_first_request():
    assert_offers(languages.read("cuda-c"), ReadLanguage, ("parameters",))


@pytest.mark.parametrize(("language", "distribution"), DISTRIBUTIONS.items())
def test_missing_language_error_names_the_distribution_and_is_retryable(language, distribution, nothing_installed):
    with pytest.raises(
        MissingLanguageError, match=f"kernels in {language} need {distribution}, .* pip install {distribution}"
    ) as e:
        languages.compiled(language)
    assert e.value.retryable and "in the environment of wooly-compiler" in str(e.value)


def test_unknown_language_error_names_the_known_languages():
    with pytest.raises(ForeignError, match="language fortran is unknown; known languages: cuda-c, ttir"):
        languages.compiled("fortran")


def test_missing_client_language_error_names_the_environment_of_the_script(nothing_installed):
    with pytest.raises(MissingLanguageError, match=r"pip install wooly-cuda-c .*in the environment of this script"):
        languages.read("cuda-c")


def test_language_with_import_error_names_the_cause(monkeypatch):
    broken = EntryPoint("ttir", "wooly_nothing.language", COMPILER)
    monkeypatch.setattr(languages, "installed", lambda group: {"ttir": broken})
    with pytest.raises(
        MissingLanguageError,
        match="wooly-triton, which is installed but cannot be imported: No module named 'wooly_nothing'",
    ):
        languages.compiled("ttir")


def test_compiler_version_depends_on_installed_languages(monkeypatch, tmp_path):
    every = dict(languages.installed(COMPILER))
    versions = set()
    for names in ((), ("ttir",), ("cuda-c",), ("cuda-c", "ttir")):
        monkeypatch.setattr(languages, "installed", lambda group, names=names: {n: every[n] for n in names})
        versions.add(compiler_version(tmp_path))
    assert len(versions) == 4


def test_compiler_version_depends_on_the_sources_of_languages(monkeypatch, tmp_path):
    folder = tmp_path / "language"
    folder.mkdir()
    monkeypatch.setattr(languages, "folders", lambda: (folder,))
    before = compiler_version(Path(tmp_path / "compiler"))
    (folder / "lower.py").write_text("1")
    assert compiler_version(Path(tmp_path / "compiler")) != before
