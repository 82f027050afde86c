"""The errors of this distribution's own. What is wrong with a text is a `ForeignError` of `wooly_wis.languages`."""

from __future__ import annotations

from wooly_wis.errors import WisError


class ChipError(WisError):
    """Triton is not installed, or does not compile a text for a chip."""

    code = "triton.chip"
