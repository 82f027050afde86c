"""Kernels in CUDA C: `syntax` reads a text to a tree, `printing` writes the tree as C in which every access is checked."""
