"""The distributions of this repository, as their `pyproject.toml` describes them."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()


@dataclass(frozen=True)
class Import:
    """One import in a source file.

    Attributes:
        importer: the module that imports.
        line: line number in its source.
        module: the imported module.
        always: whether loading the importer runs the import.
    """

    importer: str
    line: int
    module: str
    always: bool

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


@dataclass(frozen=True)
class Distribution:
    """One folder with a `pyproject.toml`.

    Attributes:
        folder: the folder.
        name: name of the distribution for pip.
        package: name of the Python package.
        required: its requirements.
        extras: the requirements of each extra.
    """

    folder: Path
    name: str
    package: str
    required: tuple[Requirement, ...]
    extras: dict[str, tuple[Requirement, ...]]

    def sources(self) -> list[Path]:
        return sorted((self.folder / "src").rglob("*.py"))

    @functools.cached_property
    def imports(self) -> list[Import]:
        """All imports of its sources, including literal arguments of `importlib.import_module`."""
        return [found for path in self.sources() for found in _imports(path, self.folder / "src")]


def _imports(path: Path, source: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text())
    always = set(tree.body)
    importer = ".".join(path.relative_to(source).with_suffix("").parts)
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names = [a.name for a in node.names]
            case ast.ImportFrom(module=str(module), level=0):
                # `from package import module` may load a module of the package
                names = [module, *[f"{module}.{a.name}" for a in node.names]]
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module)), *_]):
                names = [module]
            case _:
                continue
        for name in names:
            yield Import(importer, node.lineno, name, node in always)


def _read(path: Path) -> Distribution:
    found = tomllib.loads(path.read_text())
    table = found["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    (package,) = [Path(p).name for p in found["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    extras = {e: tuple([Requirement(r) for r in rs]) for e, rs in table.get("optional-dependencies", {}).items()}
    required = tuple([Requirement(r) for r in table["dependencies"]])
    return Distribution(path.parent, canonicalize_name(found["project"]["name"]), package, required, extras)


#: Folders of the distributions' folders.
GROUPS = ("libs", "services", "deploy", "integrations")
#: All distributions, by name.
ALL = {d.name: d for d in [_read(p) for g in GROUPS for p in sorted(ROOT.glob(f"{g}/*/pyproject.toml"))]}
