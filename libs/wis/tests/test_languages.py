"""Languages of kernels are found by entry point, named where they are missing, and part of a compiler's version."""

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
    """The module has these functions of the protocol, with its parameters and results."""
    for name in functions:
        wanted, found = inspect.signature(getattr(protocol, name)), inspect.signature(getattr(module, name))
        assert [*found.parameters.values()] == [*wanted.parameters.values()][1:], name
        assert found.return_annotation == wanted.return_annotation, name


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(languages, "installed", lambda group: {})


def test_every_language_that_can_be_checked_has_a_distribution_and_is_installed_in_a_checkout():
    assert set(LANGUAGES) - OPAQUE == set(DISTRIBUTIONS) == set(languages.installed(COMPILER))
    assert set(languages.installed(CLIENT)) == {"cuda-c"}


@pytest.mark.parametrize("language", DISTRIBUTIONS)
def test_language_is_loaded_when_it_is_asked_for(language):
    assert_offers(languages.compiled(language), CompiledLanguage, ("for_cpu", "for_gpu"))


def test_language_of_a_client_is_loaded_when_it_is_asked_for():
    assert_offers(languages.read("cuda-c"), ReadLanguage, ("parameters",))


@pytest.mark.parametrize(("language", "distribution"), DISTRIBUTIONS.items())
def test_missing_language_is_an_error_that_names_the_distribution_and_may_be_asked_again(
    language, distribution, nothing_installed
):
    with pytest.raises(
        MissingLanguageError, match=f"kernels in {language} need {distribution}, .* pip install {distribution}"
    ) as e:
        languages.compiled(language)
    assert e.value.retryable and "in the environment of wooly-compiler" in str(e.value)


def test_language_that_does_not_exist_is_an_error_that_names_those_that_do():
    with pytest.raises(ForeignError, match="language fortran is unknown; known languages: cuda-c, ttir"):
        languages.compiled("fortran")


def test_missing_language_of_a_client_says_to_install_it_where_the_script_runs(nothing_installed):
    with pytest.raises(MissingLanguageError, match=r"pip install wooly-cuda-c .*in the environment of this script"):
        languages.read("cuda-c")


def test_language_that_cannot_be_imported_says_why(monkeypatch):
    broken = EntryPoint("ttir", "wooly_nothing.language", COMPILER)
    monkeypatch.setattr(languages, "installed", lambda group: {"ttir": broken})
    with pytest.raises(
        MissingLanguageError,
        match="wooly-triton, which is installed but cannot be imported: No module named 'wooly_nothing'",
    ):
        languages.compiled("ttir")


def test_compilers_with_other_languages_have_other_versions(monkeypatch, tmp_path):
    every = dict(languages.installed(COMPILER))
    versions = set()
    for names in ((), ("ttir",), ("cuda-c",), ("cuda-c", "ttir")):
        monkeypatch.setattr(languages, "installed", lambda group, names=names: {n: every[n] for n in names})
        versions.add(compiler_version(tmp_path))
    assert len(versions) == 4


def test_version_of_a_compiler_changes_with_the_source_of_a_language(monkeypatch, tmp_path):
    folder = tmp_path / "language"
    folder.mkdir()
    monkeypatch.setattr(languages, "folders", lambda: (folder,))
    before = compiler_version(Path(tmp_path / "compiler"))
    (folder / "lower.py").write_text("1")
    assert compiler_version(Path(tmp_path / "compiler")) != before
