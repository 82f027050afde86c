"""Which releases of PyTorch have the private names that Wooly uses.

Run: python tests/torch_names.py
It looks the private names of every `torch_private.py` up in PyTorch's files, of this environment and of those that
`tests/matrix.py` has made, and writes `torch_names.json`. `test_private_names.py` then says which names need a guard.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
SOURCES = sorted(ROOT.glob("*/*/src/**/torch_private.py"))
#: The releases that clients and executors support.
RELEASES = ("2.11", "2.12", "2.13", "2.14", "2.15")
#: Libraries with names that the interpreter sees, but no source in Python.
LIBRARIES = ("libtorch_python.so", "libtorch_cpu.so", "libc10.so")
_NAME = re.compile(rb"(?<![A-Za-z0-9_])_[A-Za-z]\w*")


def private_names(node: ast.AST) -> Iterator[str]:
    """The private names below a node: attributes of what is not `self`, imports, and strings that are such a name."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            name = "" if isinstance(part.value, ast.Name) and part.value.id in ("self", "cls") else part.attr
        elif isinstance(part, ast.alias):
            name = part.name.split(".")[-1]
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            name = part.value
        else:
            continue
        if re.fullmatch(r"_[A-Za-z]\w*", name):
            yield name


def guards(node: ast.AST) -> set[str]:
    """The names that `hasattr` and `getattr` with a default ask for below a node."""
    found = set()
    for part in ast.walk(node):
        match part:
            case ast.Call(func=ast.Name(id="hasattr"), args=[_, ast.Constant(value=str(name))]):
                found.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), _]):
                found.add(name)
    return found


def unguarded(tree: ast.Module, releases_of: dict[str, list[str]]) -> set[str]:
    """Names that some releases lack, and that the source uses without asking for a name that only releases with both have."""
    found = set()
    for part in tree.body:
        asked = [set(releases_of.get(name, RELEASES)) for name in guards(part)]
        for name in set(private_names(part)):
            have = set(releases_of.get(name, RELEASES))
            if have != set(RELEASES) and not any(releases <= have for releases in asked):
                found.add(name)
    return found


def names_in(torch: Path, wanted: set[str]) -> set[str]:
    """Those of the names that occur in the files of a PyTorch."""
    found: set[str] = set()
    for path in [*torch.rglob("*.py"), *torch.rglob("*.pyi")]:
        found |= {name.decode() for name in _NAME.findall(path.read_bytes())} & wanted
    for library in LIBRARIES:
        content = (torch / "lib" / library).read_bytes()
        found |= {name for name in wanted - found if name.encode() in content}
    return found


def installed() -> dict[str, Path]:
    """The folder of each release's PyTorch that is here."""
    found = {}
    for version in [
        *ROOT.glob(".matrix/*/lib/*/site-packages/torch/version.py"),
        *ROOT.glob(".venv/lib/*/site-packages/torch/version.py"),
    ]:
        release = re.search(r"__version__ = ['\"](\d+\.\d+)", version.read_text())
        if release is not None:
            found[release[1]] = version.parent
    return found


def main() -> None:
    here = installed()
    missing = [release for release in RELEASES if release not in here]
    if missing:
        sys.exit(
            f"PyTorch {', '.join(missing)} is not here; make its environment: python tests/matrix.py --prepare 3.13:{missing[0]}"
        )
    wanted = {name for source in SOURCES for name in private_names(ast.parse(source.read_text()))}
    found = {release: names_in(here[release], wanted) for release in RELEASES}
    releases_of = {name: [release for release in RELEASES if name in found[release]] for name in sorted(wanted)}
    everywhere = [name for name, releases in releases_of.items() if len(releases) == len(RELEASES)]
    some = {name: releases for name, releases in releases_of.items() if len(releases) < len(RELEASES)}
    RECORD.write_text(json.dumps({"everywhere": everywhere, "some": some}, indent=1) + "\n")
    for name, releases in some.items():
        print(f"{name}: {', '.join(releases) or 'no release'}")


if __name__ == "__main__":
    main()
