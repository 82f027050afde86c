"""Registers the kernels of operators on quantised tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from wooly.devices import Devices
from wooly.kernels.quantised.operators import KERNELS, MAKERS, linear_prepack
from wooly.kernels.quantised.tensors import factory
from wooly.torch_private import OpOverload, redispatch_quantised_host, short_name

aten = torch.ops.aten
_FACTORIES = (
    aten.empty.memory_format,
    aten._empty_affine_quantized.default,
    aten._empty_per_channel_affine_quantized.default,
)
#: Operators whose kernel for quantised host tensors reads metadata alone, or calls other operators.
_ON_METADATA = (
    *(aten._reshape_alias.default, aten.as_strided.default, aten.view.default, aten.unfold.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default),
    *(aten.clone.default, aten.empty_like.default, aten.empty_quantized.default),
    *(aten.set_.source_Storage_storage_offset, aten.max.dim, aten.min.dim),
    *(aten.q_scale.default, aten.q_zero_point.default, aten.qscheme.default),
    *(aten.q_per_channel_scales.default, aten.q_per_channel_zero_points.default, aten.q_per_channel_axis.default),
)
#: Operators whose code for every device reads the memory of its arguments itself, which ends the process (also on CUDA).
_READING_MEMORY = (
    *(
        "_saturate_weight_to_fp16",
        "_wrapped_linear_prepack",
        "_wrapped_quantized_linear_prepacked",
        "choose_qparams_optimized",
    ),
    *("fbgemm_linear_fp16_weight", "fbgemm_linear_fp16_weight_fp32_activation", "fbgemm_linear_int8_weight"),
    *("fbgemm_linear_int8_weight_fp32_activation", "fbgemm_linear_quantize_weight", "fbgemm_pack_gemm_matrix_fp16"),
    *("fbgemm_pack_quantized_matrix", "quantized_gru_cell", "quantized_lstm_cell", "quantized_rnn_relu_cell"),
    "quantized_rnn_tanh_cell",
)
_KEY = "QuantizedPrivateUse1"


def register_quantised(devices: Devices) -> list[torch.library.Library]:
    """Register the kernels that CUDA has for quantised tensors, and CUDA's error for the other operators.

    The registrations live as long as the returned libraries.
    """
    library, rest = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    packed = torch.library.Library("quantized", "IMPL")
    for op in _FACTORIES:
        for key in (_KEY, "QuantizedCUDA"):
            library.impl(short_name(op), factory(op, devices), key)
    for op in _ON_METADATA:
        library.impl(short_name(op), redispatch_quantised_host(op), _KEY)
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, _KEY)
    for name, kernel in MAKERS.items():
        library.impl(name, kernel, "PrivateUse1", allow_override=True)
    for packet in [getattr(aten, name) for name in _READING_MEMORY if hasattr(aten, name)]:
        for overload in packet.overloads():
            op = getattr(packet, overload)
            library.impl(short_name(op), partial(_refuse_reading, op), "PrivateUse1")
    packed.impl("linear_prepack", linear_prepack, _KEY)
    rest.fallback(_refuse, _KEY)
    return [library, packed, rest]


def _refuse(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        f"Could not run '{op.name()}' with arguments from the 'QuantizedCUDA' backend: CUDA has no kernel of this operator for "
        "quantized tensors; dequantize them first (x.dequantize()), or compute on the CPU (x.cpu())"
    )


def _refuse_reading(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        f"Could not run '{op.name()}' with arguments from the 'CUDA' backend: the operator reads host memory; compute it on the "
        "CPU: x.cpu()"
    )
