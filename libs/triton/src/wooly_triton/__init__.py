"""Kernels in TTIR, the text of Triton, as code in which every access is checked.

For CPUs as OpenCL C: `text` reads, `lower` writes, `ops` is the table of what is lowered. For GPUs by Triton itself (`chips`),
after `guard` wrote checks into the text.
"""
