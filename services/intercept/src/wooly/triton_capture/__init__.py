"""Captures launches of Triton kernels without a GPU: as TTIR, recorded as `kernel.launch`.

Triton's own runtime does signatures, specialisation, constexprs, heuristics, autotuning and caching. This package gives it a
driver that represents the remote device, and a compiler whose only stage is `ttir`, a text that does not depend on a vendor.
Triton is not imported before the script imports it. So only the modules `activation` and `writes` can be imported without Triton.
"""

from wooly.triton_capture.activation import activate, deactivate

__all__ = ["activate", "deactivate"]
