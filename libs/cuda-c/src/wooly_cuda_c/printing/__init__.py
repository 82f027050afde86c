"""Prints a tree of CUDA C as OpenCL C, CUDA C or HIP C in which every access is checked."""
