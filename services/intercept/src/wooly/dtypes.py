"""Tables that map PyTorch dtypes to WIS dtypes, and WIS dtypes to PyTorch dtypes."""

from __future__ import annotations

import torch
from wooly_wis.dtypes import DType


class _Dtypes(dict[torch.dtype, DType]):
    def __missing__(self, dtype: torch.dtype) -> DType:
        raise NotImplementedError(
            f"tensors of {dtype} are not supported on the wooly device; convert them to another dtype, or compute on the CPU: "
            "x.cpu()"
        )


#: Raises NotImplementedError for a dtype that WIS does not have (quantized integers, dtypes of later releases of PyTorch).
DTYPES: dict[torch.dtype, DType] = _Dtypes(
    {
        torch.bool: DType.BOOL,
        torch.uint8: DType.U8,
        torch.int8: DType.I8,
        torch.int16: DType.I16,
        torch.int32: DType.I32,
        torch.int64: DType.I64,
        torch.uint16: DType.U16,
        torch.uint32: DType.U32,
        torch.uint64: DType.U64,
        torch.float16: DType.F16,
        torch.bfloat16: DType.BF16,
        torch.float32: DType.F32,
        torch.float64: DType.F64,
        torch.complex32: DType.C32,
        torch.complex64: DType.C64,
        torch.complex128: DType.C128,
        torch.float8_e4m3fn: DType.F8E4M3FN,
        torch.float8_e5m2: DType.F8E5M2,
        torch.float8_e4m3fnuz: DType.F8E4M3FNUZ,
        torch.float8_e5m2fnuz: DType.F8E5M2FNUZ,
        torch.float8_e8m0fnu: DType.F8E8M0FNU,
    }
)
TORCH_DTYPES: dict[DType, torch.dtype] = {v: k for k, v in DTYPES.items()}
