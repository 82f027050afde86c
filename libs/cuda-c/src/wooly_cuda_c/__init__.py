"""Kernels in CUDA C: `syntax` parses a text to a tree, and `printing` writes the tree as C in which every access is checked."""
