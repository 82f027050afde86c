"""The configuration reference matches the settings models."""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS / "reference"))
import configuration  # noqa: E402
from wooly_bus.other_names import CLIENT, EXECUTOR  # noqa: E402


def test_configuration_reference_matches_models():
    """If this fails: make docs."""
    assert (DOCS / "reference" / "configuration.md").read_text() == configuration.page()


def test_configuration_reference_has_all_processes():
    titles = {title for title, _, _ in configuration.models()}
    assert {"client", "router", "scheduler", "executor", "operator", "every service"} <= titles


def test_variables_named_in_documentation_exist():
    known = {
        configuration.variable(model, name, field)
        for _, _, model in configuration.models()
        for name, field in model.model_fields.items()
    }
    known |= {name.theirs for name in (*CLIENT, *EXECUTOR)}
    deploy = DOCS.parent / "deploy"
    for path in (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md")), *sorted(deploy.glob("*/README.md"))):
        named = set(
            re.findall(
                r"\b(?:WOOLY_(?:ROUTER|SCHEDULER|EXECUTOR|OPERATOR|HEALTH)|WOOLYAI)_[A-Z_]+[A-Z]\b", path.read_text()
            )
        )
        assert named <= known, (path.name, named - known)
