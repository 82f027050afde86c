"""The operators whose result may depend on `torch.use_deterministic_algorithms`.

Only forms of these operators may have the attribute `deterministic`. So a program that does not call them has the same digest in
both modes.
"""

from __future__ import annotations

#: Operators whose kernels read PyTorch's switch, and the algorithm of each kernel when the switch is on. Names have no overload.
SENSITIVE: dict[str, str] = {
    "_index_put_impl_": "CPU: one thread; CUDA: sorts the indices",
    "convolution": "CUDA: cuDNN may use only deterministic algorithms",
    "convolution_backward": "CUDA: cuDNN may use only deterministic algorithms",
    "cumsum": "CUDA: a scan with a fixed order",
    "cumsum_": "CUDA: a scan with a fixed order",
    "index_add": "CUDA: index_put_ with accumulation",
    "index_add_": "CUDA: index_put_ with accumulation",
    "index_copy": "CPU: one thread; CUDA: index_put_",
    "index_copy_": "CPU: one thread; CUDA: index_put_",
    "max_pool3d_with_indices_backward": "CUDA: sums without atomics",
    "put_": "CPU: one thread if it accumulates",
    "scatter": "CUDA: index_put_",
    "scatter_": "CUDA: index_put_",
    "scatter_add": "CUDA: index_put_ with accumulation",
    "scatter_add_": "CUDA: index_put_ with accumulation",
    "scatter_reduce": "CUDA: index_put_ with accumulation, for sums and means",
    "scatter_reduce_": "CUDA: index_put_ with accumulation, for sums and means",
}


def is_sensitive(name: str) -> bool:
    """Whether an operator overload such as ``aten.index_copy.default`` may have the attribute `deterministic`."""
    parts = name.split(".")
    return len(parts) == 3 and parts[1] in SENSITIVE
