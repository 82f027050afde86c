"""The kernels of PyTorch operators on the Wooly device. Each call becomes WIS instructions or only changes metadata."""
