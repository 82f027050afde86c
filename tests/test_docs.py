"""Rules of the documentation: form of decisions, valid references, working links, length of the README."""

import importlib.util
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
#: Maximum length of the README and of a decision, in lines, so that each can be read in one sitting.
README_LINES, DECISION_LINES = 200, 40


def _tracked(*patterns):
    """Files of the repository: tracked files, and new files that git does not ignore."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    found = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return [ROOT / name for name in sorted(filter(None, found)) if (ROOT / name).is_file()]


PAGES = {path.relative_to(ROOT).as_posix(): path for path in _tracked("*.md")}
DECISIONS = {path.name: path for path in _tracked("docs/adr/[0-9]*.md")}
NUMBERS = {int(name[:4]): name for name in DECISIONS}


def _prose(text):
    """Markdown without code blocks, whose text may look like a link or a heading."""
    text = re.sub(r"^( *)(```+|~~~+)[^\n]*\n.*?^\1\2[ ]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", lambda code: "c" * len(code[0]), text, flags=re.DOTALL)


@cache
def _anchors(path):
    """The anchors of a page's headings, by GitHub's rule. `mkdocs.yml` uses the same rule for the site."""
    text = re.sub(r"^( *)(```+|~~~+)[^\n]*\n.*?^\1\2[ ]*$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = base = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = 0
        while anchor in found:
            count += 1
            anchor = f"{base}-{count}"
        found.add(anchor)
    return found


def _slug(title):
    """The file name of a decision with this title."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"['\"]", "", title.lower())).strip("-")


def _script(name):
    """Import a script of the documentation as a module."""
    spec = importlib.util.spec_from_file_location(f"wooly_docs_{name}", ROOT / f"docs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _named(status, relation):
    """Numbers of the decisions to which a status has a relation."""
    return {
        int(number)
        for clause in re.split(r"; ", status)
        if re.search(relation, clause)
        for number in re.findall(r"\[ADR (\d+)\]", clause)
    }


@pytest.mark.parametrize("page", PAGES)
def test_page_links_point_to_existing_files_and_headings(page):
    path = PAGES[page]
    for target in re.findall(r"\]\(([^()\s]+)\)", _prose(path.read_text())):
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue
        name, _, fragment = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.exists(), f"{target}: this file does not exist"
        assert there.is_relative_to(ROOT), f"{target}: this file is outside of the repository"
        if fragment:
            assert fragment in _anchors(there), (
                f"{target}: this heading does not exist; the page has {sorted(_anchors(there))}"
            )


@pytest.mark.parametrize(
    ("text", "anchors"),
    [
        ("# The `wis` codec, v2\n\n## The codec\n## The codec\n", {"the-wis-codec-v2", "the-codec", "the-codec-1"}),
        ("# A\n```sh\n# not a heading\n```\n", {"a"}),
    ],
)
def test_anchors_follow_github_rule(tmp_path, text, anchors):
    (tmp_path / "page.md").write_text(text)
    assert _anchors(tmp_path / "page.md") == anchors


def test_readme_is_within_length_limit():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_decision_numbers_are_consecutive_and_unique():
    assert sorted(NUMBERS) == list(range(1, len(DECISIONS) + 1))


@pytest.mark.parametrize("name", DECISIONS)
def test_decision_has_title_status_context_decision_consequences(name):
    text = DECISIONS[name].read_text()
    assert len(text.splitlines()) <= DECISION_LINES
    title = re.match(r"# (\d{4})\. (.+)\n\nStatus: ", text)
    assert title, "the first lines must be `# NNNN. Title`, an empty line, `Status: …`"
    assert name == f"{title[1]}-{_slug(title[2])}.md", "the file must be named after the title"
    assert re.findall(r"^#+ .+$", text, re.MULTILINE)[1:] == ["## Context", "## Decision", "## Consequences"]
    assert re.search(r"^## Decision\n\n?> \S", text, re.MULTILINE), "a decision must begin with one quoted sentence"
    for part in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]:
        assert part.strip()


@pytest.mark.parametrize("name", DECISIONS)
def test_decision_status_is_confirmed_by_other_decision(name):
    status_of = _script("decisions").status_of
    number, status = int(name[:4]), status_of(DECISIONS[name].read_text())
    assert status.startswith(("accepted", "superseded by"))
    for here, there in (
        (r"superseded by", r"^supersedes"),
        (r"^supersedes", r"superseded by"),
        (r"extended by", r"^extends"),
        (r"^extends", r"extended by"),
    ):
        for other in _named(status, here):
            answer = status_of(DECISIONS[NUMBERS[other]].read_text())
            assert number in _named(answer, there), f"ADR {other} does not have the reverse relation: {answer}"


def test_decision_index_matches_records():
    """If this fails: make docs."""
    assert (ROOT / "docs/adr/index.md").read_text() == _script("decisions").page()


def test_decisions_named_in_repository_exist():
    unknown = []
    for path in _tracked("*.py", "*.md", "*.toml", "*.txt", "*.yaml", "*.yml", "*.sh", "*.js", "*.c", "Makefile"):
        for number in re.findall(r"\bADRs? (\d+)", path.read_text()):
            if int(number) not in NUMBERS:
                unknown.append(f"{path.relative_to(ROOT)}: ADR {number}")
        for name in re.findall(r"\badr/(\d{4}[\w-]*\.md)", path.read_text()):
            if name not in DECISIONS:
                unknown.append(f"{path.relative_to(ROOT)}: {name}")
    assert not unknown


class _Navigation(yaml.SafeLoader):
    """Reads mkdocs.yml without mkdocs: Python tags become None."""


_Navigation.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def _pages_of(navigation):
    """The pages in a part of the navigation."""
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for part in parts for page in _pages_of(part)]


def test_site_navigation_names_every_page_once():
    named = _pages_of(yaml.load((ROOT / "mkdocs.yml").read_text(), _Navigation)["nav"])  # _Navigation is a SafeLoader
    decisions = [f"adr/{name}" for name in DECISIONS]
    assert sorted(named + decisions) == sorted(_script("site_hooks").page_of(page) for page in PAGES)


@pytest.mark.parametrize(
    ("page", "text", "there"),
    [
        ("index.md", "[a](docs/guides/jobs.md#x)", "[a](guides/jobs.md#x)"),
        ("index.md", "![a](docs/images/ui-dashboard.png)", "![a](images/ui-dashboard.png)"),
        ("guides/jobs.md", "[a](../../ARCHITECTURE.md#layers)", "[a](../architecture.md#layers)"),
        ("architecture.md", "[a](docs/adr)", "[a](adr/index.md)"),
        ("components/executor.md", "[a](../../docs/adr/index.md)", "[a](../adr/index.md)"),
        (
            "components/executor.md",
            "[the script](tools/list_externs.py) `[a](README.md)`",
            "the script `[a](README.md)`",
        ),
        ("guides/jobs.md", "[a](nowhere.md)", "[a](nowhere.md)"),
        ("guides/jobs.md", "[a](https://example.org/b) [c](#d)", "[a](https://example.org/b) [c](#d)"),
    ],
)
def test_site_links_are_rewritten_between_pages(page, text, there):
    assert _script("site_hooks").translated(text, page) == there
