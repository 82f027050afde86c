"""The metadata that all distributions of this repository share. hatchling runs it when it builds any of them.

The version is in the file VERSION. The distributions of one release belong together: a requirement that names one of them
asks for exactly this version, so that an upgrade of one upgrades the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


class ReleaseHook(MetadataHookInterface):
    """Fills in the dynamic fields `version`, `dependencies` and `optional-dependencies`.

    The requirements are written in the table `tool.hatch.metadata.hooks.custom` of each `pyproject.toml`.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the version and the requirements in `metadata`, the table `project`."""
        version = Path(__file__).with_name("VERSION").read_text().strip()
        metadata["version"] = version
        metadata["dependencies"] = [_pinned(r, version) for r in self.config["dependencies"]]
        if "optional-dependencies" in metadata["dynamic"]:
            extras = self.config["optional-dependencies"]
            metadata["optional-dependencies"] = {e: [_pinned(r, version) for r in rs] for e, rs in extras.items()}


def _pinned(requirement: str, version: str) -> str:
    """A requirement; if it names a distribution of this repository, of exactly this version."""
    found = Requirement(requirement)
    if found.name == "wooly" or found.name.startswith("wooly-"):
        found.specifier = SpecifierSet(f"=={version}")
    return str(found)
