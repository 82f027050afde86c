"""Quantised tensors: PyTorch's own objects in this process, whose integers are on the device, and their operators."""
