"""The errors of this distribution. Errors in a text are `ForeignError`s of `wooly_wis.languages`."""

from __future__ import annotations

from wooly_wis.errors import WisError


class ChipError(WisError):
    """Triton is not installed, or cannot compile a text for a chip."""

    code = "triton.chip"
