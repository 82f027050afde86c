"""Wooly's compiler: WIS programs become plans of generated kernels and library calls."""
