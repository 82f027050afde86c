"""torchaudio's recursive filter (`lfilter`, all biquads), whose samples depend on the samples before them.

torchaudio has a kernel in CUDA for it, which needs addresses, and one made of PyTorch's operators: three operators per sample.
Here it is a kernel in CUDA C with the order of torchaudio's own kernels, so that it has the bits of the one for CPUs.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from wooly_wis import languages
from wooly_wis.errors import WisError

from wooly.devices import Devices
from wooly.torch_private import raw_device

if TYPE_CHECKING:
    from wooly.kernels.cuda_c import CudaKernel

#: Threads of a block. Each thread filters one channel of one signal.
_BLOCK = 64
_C_NAMES = {torch.float32: "float", torch.float64: "double"}
#: CUDA's names of other dtypes, for its error.
_OTHERS = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.complex64: "ComplexFloat"}
#: `a` has the coefficients of each channel, the last one first. `out` starts with `order - 1` samples of the past.
_SOURCE = """
template <typename T>
__global__ void recursive_filter(const T *x, const T *a, T *out, int signals, int channels, int samples, int order,
    long long x0, long long x1, long long x2, long long a0, long long a1, long long out0, long long out1, long long out2) {
  int thread = blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= signals * channels) return;
  int signal = thread / channels, channel = thread % channels;
  x += signal * x0 + channel * x1;
  a += channel * a0;
  out += signal * out0 + channel * out1;
  for (int i = 0; i < samples; i++) {
    T sum = x[i * x2];
    for (int k = 0; k < order; k++) sum -= a[k * a1] * out[(i + k) * out2];
    out[(i + order - 1) * out2] = sum;
  }
}
"""


def register_recursive_filter(devices: Devices) -> torch.library.Library:
    """Register the kernel. torchaudio may be imported later, or never."""
    library = torch.library.Library("torchaudio", "IMPL")
    library.impl("_lfilter_core_loop", functools.partial(_filter, devices), "PrivateUse1")
    return library


def _filter(devices: Devices, x: Tensor, a: Tensor, out: Tensor) -> Tensor:
    """`out[..., i + order - 1] = x[..., i] - sum(a * out[..., i:i + order])` for each sample `i`, in order.

    Shapes: x (signals, channels, samples); a (channels, order); out (signals, channels, samples + order - 1).

    Raises:
        NotImplementedError: the dtype is not float32 or float64, as on CUDA.
        RuntimeError: the tensors do not fit together.
    """
    _check(x, a, out)
    if not x.numel():
        return out
    link = devices.recorders[raw_device(x).index or 0].require_link()
    kernel = None if link.device.get("runtime") == "torch-cpu" else _kernel(_C_NAMES[x.dtype])
    if kernel is None:
        return _in_operators(x, a, out)
    sizes = (*x.shape, a.shape[1], *x.stride(), *a.stride(), *out.stride())
    blocks = -(-x.shape[0] * x.shape[1] // _BLOCK)
    kernel((blocks, 1, 1), (_BLOCK, 1, 1), [x, a, out, *sizes])
    return out


def _check(x: Tensor, a: Tensor, out: Tensor) -> None:
    if x.dtype not in _C_NAMES:
        name = _OTHERS.get(x.dtype, str(x.dtype).removeprefix("torch."))
        raise NotImplementedError(f"\"iir_cu_loop\" not implemented for '{name}'")
    if not x.dtype is a.dtype is out.dtype:
        raise RuntimeError(f"lfilter: expected one dtype, but got {x.dtype}, {a.dtype} and {out.dtype}")
    if not x.device == a.device == out.device:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices: "
            + ", ".join(dict.fromkeys(str(t.device) for t in (x, a, out)))
        )
    fits = (x.dim(), a.dim(), out.dim()) == (3, 2, 3) and a.shape[1] > 0
    if not fits or a.shape[0] != x.shape[1] or out.shape != (*x.shape[:2], x.shape[2] + a.shape[1] - 1):
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, a, out))
        raise RuntimeError(f"lfilter: the shapes of signal, coefficients and result do not fit together: {shapes}")


@functools.cache
def _kernel(c_name: str) -> CudaKernel | None:
    """The kernel; None: `wooly-cuda-c` is not installed here."""
    from wooly.kernels.cuda_c import CudaKernel

    try:
        languages.read("cuda-c")
    except WisError:
        return None
    return CudaKernel(_SOURCE, f"recursive_filter<{c_name}>")


def _in_operators(x: Tensor, a: Tensor, out: Tensor) -> Tensor:
    """The filter with three operators per sample, for executors that cannot run kernels."""
    order = a.shape[1]
    for i in range(x.shape[2]):
        out[:, :, i + order - 1] = x[:, :, i] - (out[:, :, i : i + order] * a).sum(-1)
    return out
