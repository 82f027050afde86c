"""Operators on sparse tensors: checked sparse tensors from dense operands, and calls of the library's own kernels."""
