"""Wooly's compiler turns a WIS program into a plan of generated kernels and library calls."""
