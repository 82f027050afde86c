"""Hooks of mkdocs (`make site`): files outside of docs/ become pages, and links between all of them work in both places.

In the repository a link is a path, as GitHub follows it. Here it is translated to the page that the file became. A link to a file
that is no page (a source, a script) becomes its text. A link that leads nowhere stays, so that `mkdocs build --strict` fails.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the tests know this module without mkdocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: Pages that come from outside of docs/: file in the repository, page in the site.
OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "services/executor/tests/hostile/README.md": "components/hostile.md",
    "services/intercept/native/README.md": "components/native.md",
    **{
        path.relative_to(ROOT).as_posix(): f"components/{path.parent.name}.md"
        for kind in ("libs", "services", "deploy", "integrations")
        for path in sorted((ROOT / kind).glob("*/README.md"))
    },
}
#: Code, in blocks and in lines: what looks like a link there is none.
_CODE = re.compile(r"^( *)(`{3,}|~{3,})[^\n]*\n.*?^\1\2[ ]*$|(`+)(?!`).*?(?<!`)\3(?!`)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def page_of(path: str) -> str | None:
    """The page or image of the site that a file of the repository became, or None."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/") and path.endswith((".md", ".png")):
        return path.removeprefix("docs/")
    index = f"{path}/index.md"
    return index.removeprefix("docs/") if path.startswith("docs/") and (ROOT / index).exists() else None


def file_of(page: str) -> str:
    """The file of the repository that became a page."""
    return next((path for path, uri in OUTSIDE.items() if uri == page), f"docs/{page}")


def translated(text: str, page: str) -> str:
    """Markdown of a page, with links to pages in place of links to files."""
    source, here = posixpath.dirname(file_of(page)), posixpath.dirname(page)

    def link(found: re.Match[str]) -> str:
        target, hash_, fragment = found[3].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        path = posixpath.normpath(posixpath.join(source, target))
        there = page_of(path)
        if there is None:
            return found[2] if (ROOT / path).exists() else found[0]
        return f"{found[1]}[{found[2]}]({posixpath.relpath(there, here or '.')}{hash_}{fragment})"

    code: list[str] = []

    def hidden(found: re.Match[str]) -> str:
        code.append(found[0])
        return f"\0{len(code) - 1}\0"

    out = _LINK.sub(link, _CODE.sub(hidden, text))
    return re.sub(r"\0(\d+)\0", lambda found: code[int(found[1])], out)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the decisions to the navigation: their files are the list."""
    decisions = [f"adr/{path.name}" for path in sorted((ROOT / "docs/adr").glob("[0-9]*.md"))]
    section: dict[str, Any] = next(entry for entry in config.nav or [] if "Decisions" in entry)
    section["Decisions"] = ["adr/index.md", *decisions]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Bring in the pages from outside of docs/."""
    from mkdocs.structure.files import File

    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Translate the links of a page."""
    return translated(markdown, page.file.src_uri)
