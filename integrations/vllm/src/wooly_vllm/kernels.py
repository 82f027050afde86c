"""Lets vLLM choose its kernels in Triton for mixtures of experts and quantised weights, which it offers to its own platforms."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import vllm.model_executor.kernels.linear as linear
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.quantization import auto_awq
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum

from wooly_vllm import operators

#: Modules of vLLM that offer kernels in Triton, or in PyTorch's operators, only where the platform is CUDA.
_MODULES = (
    "vllm.model_executor.kernels.linear.mixed_precision.exllama",
    "vllm.model_executor.kernels.linear.mixed_precision.triton_w4a16",
    "vllm.model_executor.kernels.linear.scaled_mm.pytorch",
    "vllm.model_executor.kernels.linear.scaled_mm.triton",
    "vllm.model_executor.layers.fused_moe.experts.triton_moe",
    "vllm.model_executor.layers.fused_moe.oracle.unquantized",
)
#: Kernels of linear layers by vLLM's name of the kind, the preferred one first.
_LINEAR = {
    "mp": (linear.TritonW4A16LinearKernel, linear.ExllamaLinearKernel),
    "fp8": (linear.PerTensorTorchFP8ScaledMMLinearKernel, linear.ChannelWiseTorchFP8ScaledMMLinearKernel),
    "int8": (linear.TritonInt8ScaledMMLinearKernel,),
}


class _AsCuda:
    """The platform, to the modules of `_MODULES`."""

    def is_cuda(self) -> bool:
        return True

    def is_cuda_alike(self) -> bool:
        return True

    def is_out_of_tree(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(current_platform, name)


@functools.cache
def install() -> None:
    """Register and replace what chooses kernels, and define the operators around them. Calling it again changes nothing."""
    operators.install()
    for name in _MODULES:
        module: Any = importlib.import_module(name)
        module.current_platform = _AsCuda()
    for kind, kernels in _LINEAR.items():
        for kernel in kernels:
            linear.register_linear_kernel(kernel, PlatformEnum.OOT, kind)
    # vLLM registers none of this kind by name.
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.OOT] = [linear.TritonFp8BlockScaledMMKernel]
    unquantized._get_priority_backends = lambda moe_config: [unquantized.UnquantizedMoeBackend.TRITON]
    os.environ.setdefault("VLLM_USE_TRITON_AWQ", "1")
    os.environ["VLLM_GDN_DECODE_KERNEL"] = (
        "triton"  # of gated delta rules; vLLM thinks that this platform has the one for CUDA
    )
    # vLLM takes its kernel in Triton for experts in AWQ's layout where the one for CUDA does not fit.
    auto_awq.check_moe_marlin_supports_layer = lambda *layer, **options: False
