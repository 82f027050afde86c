"""Triton's kernels, launched in this process without a GPU: captured as TTIR and recorded as `kernel.launch`.

Triton's own runtime does all the rest: signatures, specialisation, constexprs, heuristics, autotuning, its cache. Here it finds
a driver that answers for the remote device, and a compiler whose only stage is `ttir`: a text in which no vendor appears. Nothing
of Triton is imported before the script does: of the modules here, only `activation` and `writes` can be without it.
"""

from wooly.triton_capture.activation import activate, deactivate

__all__ = ["activate", "deactivate"]
