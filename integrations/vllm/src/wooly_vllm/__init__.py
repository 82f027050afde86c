"""vLLM on Wooly's "cuda": the function that vLLM finds by its entry point. Importing this module does not import vLLM."""

from __future__ import annotations


def platform_plugin() -> str | None:
    """The platform for vLLM (entry point `vllm.platform_plugins`).

    Returns:
        The qualified name of the platform's class, or None if "cuda" is not Wooly's in this process. vLLM then looks for another
        platform.
    """
    from wooly import api

    return "wooly_vllm.platform.WoolyPlatform" if api.is_enabled() else None
