"""The `wooly` command. Torch is imported only by the commands that need it."""

from __future__ import annotations

from wooly.cli.commands import main

__all__ = ["main"]
