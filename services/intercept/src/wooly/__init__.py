"""Wooly: "cuda" work of an ordinary PyTorch program, executed on a device elsewhere."""
