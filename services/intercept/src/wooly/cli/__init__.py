"""The command `wooly`. Only the commands that need torch import it."""

from __future__ import annotations

from wooly.cli.commands import main

__all__ = ["main"]
