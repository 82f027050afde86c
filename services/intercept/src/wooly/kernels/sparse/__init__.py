"""Sparse tensors: containers in this process, whose indices and values are device tensors, and calls on the executor."""
