"""Writes docs/reference/configuration.md from the settings models of all services (`make docs`).

What a variable means comes from the field's description, from the class's `Attributes:`, or from the table in the service's
README.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from wooly_bus.other_names import CLIENT, EXECUTOR, SAME

ROOT = Path(__file__).parents[2]
HEAD = """# Configuration

This page lists every variable of every process. It is written from the settings models
(`make docs`). The settings of the client may also stand in `~/.config/wooly/config` (TOML, lower
case, without the prefix); if both exist, the variable wins. `OTEL_EXPORTER_OTLP_ENDPOINT` and similar
variables are those of OpenTelemetry and are valid for every process, clients too.
"""


def models() -> Iterator[tuple[str, Path, type[BaseSettings]]]:
    """Title, distribution's folder and model, of all settings there are."""
    found = sorted(ROOT.glob("services/*/src/*/settings.py")) + sorted(ROOT.glob("deploy/*/src/*/settings.py"))
    bus = ROOT / "libs/bus/src/wooly_bus"
    for path in (*found, bus / "health.py", bus / "access.py", bus / "tracing.py", bus / "http_listener.py"):
        module = importlib.import_module(f"{path.parent.name}.{path.stem}")
        for _, model in inspect.getmembers(module, inspect.isclass):
            if issubclass(model, BaseSettings) and model.__module__ == module.__name__:
                folder = path.parents[2]
                title = {"intercept": "client", "bus": "every service"}.get(folder.name, folder.name)
                yield title, folder, model


def variable(model: type[BaseSettings], name: str, field: FieldInfo) -> str:
    """The environment's name of a field."""
    alias = field.validation_alias
    return alias if isinstance(alias, str) else f"{model.model_config.get('env_prefix', '')}{name}".upper()


def meanings(folder: Path, model: type[BaseSettings]) -> dict[str, str]:
    """What variables mean, by variable."""
    readme = (folder / "README.md").read_text()
    said = {m[1]: m[2].strip() for m in re.finditer(r"^\| `(\w+)` \|[^|]*\| (.*) \|$", readme, re.MULTILINE)}
    attributes = re.search(r"Attributes:\n(.*)", inspect.cleandoc(model.__doc__ or ""), re.DOTALL)
    documented = {}
    if attributes:
        entries = re.finditer(r"^    (\w+): (.*(?:\n {6,}.*)*)", attributes[1], re.MULTILINE)
        documented = {m[1]: re.sub(r"\s+", " ", m[2]).rstrip(".") for m in entries}
    for name, field in model.model_fields.items():
        text = field.description or documented.get(name)
        if text:
            said[variable(model, name, field)] = text
    return said


def default(field: FieldInfo) -> str:
    """A field's default as one would write it; nothing where it depends on the machine."""
    value = field.default
    if field.default_factory is not None or field.is_required() or value in (None, "", ()):
        return ""
    return f"`{int(value) if isinstance(value, bool) else value}`"


def allowed(annotation: Any, field: FieldInfo) -> str:
    """What may be written, where that is a choice or a range."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{a}`" for a in get_args(annotation))
    bounds = {
        k: getattr(m, k) for m in field.metadata for k in ("ge", "gt", "le", "lt") if getattr(m, k, None) is not None
    }
    return " and ".join(
        f"{sign} {_number(bounds[k])}"
        for k, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        if k in bounds
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:g}"


def page() -> str:
    """The whole page.

    Raises:
        ValueError: nothing says what a variable means.
    """
    parts = [HEAD]
    for title, folder, model in models():
        said = meanings(folder, model)
        rows = [f"\n## {title.capitalize()}\n", "| variable | default | allowed | meaning |", "|---|---|---|---|"]
        for name, field in model.model_fields.items():
            known = variable(model, name, field)
            if known not in said:
                where = f"{folder.relative_to(ROOT)}: {model.__name__}.{name}"
                raise ValueError(f"{where} is nowhere described: not in its field, its docstring or the README's table")
            text = said[known].replace("|", "\\|")
            rows.append(f"| `{known}` | {default(field)} | {allowed(field.annotation, field)} | {text} |")
        parts.append("\n".join(rows) + "\n")
    return "".join([*parts, other_names()])


def other_names() -> str:
    """The section about names of another product."""
    rows = [f"| `{name.theirs}` | `{name.ours}` | {name.meaning} |" for name in (*CLIENT, *EXECUTOR)]
    same = "\n".join(f"- {text}" for text in SAME)
    return f"""
## Names from elsewhere

Some people know another GPU hypervisor whose settings have the same prefix. Where its names differ
from ours, both are understood. If both are set and differ, ours counts, with a warning.

| their name | ours | values |
|---|---|---|
{chr(10).join(rows)}

The same in both:

{same}

Not read: `LISTEN_ADDR`, because many programs use this name; ours is `WOOLY_EXECUTOR_LISTEN`.
"""


if __name__ == "__main__":
    sys.stdout.write(page())
