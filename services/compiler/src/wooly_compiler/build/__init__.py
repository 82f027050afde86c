"""Builds sources to code for a chip. Only this package uses vendors' compilers."""
