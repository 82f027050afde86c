"""CUDA C to C in which every access is checked: OpenCL C, CUDA C or HIP C, from one tree."""
