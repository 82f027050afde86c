"""Compiles kernels in TTIR, the text of Triton, to code in which every access is checked.

For CPUs, the result is OpenCL C: `text` reads, `lower` writes, and `ops` is the table of supported operations. For GPUs, Triton
itself compiles the text (`chips`), after `guard` inserted checks.
"""
