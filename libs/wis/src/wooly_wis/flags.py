"""The flags of the device's libraries that a script may set, and the operators that follow each flag.

A *flag* is one departure from PyTorch's defaults in `torch.backends.cuda.matmul` and `torch.backends.cudnn`. A form has the
attribute `flags` only if the script departs from the defaults. So a program of a script that sets no flag has the digest and the
opcodes that it would have without flags.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from wooly_wis.dtypes import DType

_SINGLE = frozenset({DType.F32, DType.C64})
_FLOATS = frozenset(d for d in DType if d.kind in ("float", "complex"))
_F16, _BF16 = frozenset({DType.F16}), frozenset({DType.BF16})

#: For each flag, the dtypes of operands that it concerns.
DTYPES: dict[str, frozenset[DType]] = {
    "cudnn_deterministic": _FLOATS,
    "fp16_accumulation": _F16,
    "matmul_tf32": _SINGLE,
    "no_bf16_reduction": _BF16,
    "no_bf16_split_k": _BF16,
    "no_conv_tf32": _SINGLE,
    "no_fp16_reduction": _F16,
    "no_fp16_split_k": _F16,
    "no_rnn_tf32": _SINGLE,
}

#: What each flag asks of the device's libraries. A device without the feature ignores the flag.
SAYS: dict[str, str] = {
    "cudnn_deterministic": "cuDNN may use only deterministic algorithms",
    "fp16_accumulation": "products of float16 may be summed in float16",
    "matmul_tf32": "the factors of products in float32 may be rounded to TF32",
    "no_bf16_reduction": "parts of a product of bfloat16 must be summed in float32",
    "no_bf16_split_k": "as `no_bf16_reduction`, and the sums must not be split into parts",
    "no_conv_tf32": "convolutions in float32 must not round to TF32",
    "no_fp16_reduction": "parts of a product of float16 must be summed in float32",
    "no_fp16_split_k": "as `no_fp16_reduction`, and the sums must not be split into parts",
    "no_rnn_tf32": "recurrent layers in float32 must not round to TF32",
}

_CONVOLUTION = frozenset({"cudnn_deterministic", "no_conv_tf32"})
_PRODUCT = frozenset(
    {
        *("fp16_accumulation", "matmul_tf32", "no_bf16_reduction", "no_bf16_split_k"),
        *("no_fp16_reduction", "no_fp16_split_k"),
    }
)
#: cuDNN computes whole layers, and the library computes the other layers with matrix products.
_RECURRENT = _PRODUCT | {"no_rnn_tf32"}

#: For each operator, without namespace and overload, the flags that it follows. The native products have these names, too.
FOLLOWS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("convolution", "convolution_backward"), _CONVOLUTION),
    **dict.fromkeys(
        (
            *("mm", "bmm", "linear", "addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "addbmm_", "addmv", "addmv_"),
            *("_addmm_activation", "_foreach_mm", "linalg_matrix_exp"),
            *("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
            *("_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention_for_cpu"),
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
        ),
        _PRODUCT,
    ),
    **dict.fromkeys(
        ("lstm", "gru", "rnn_tanh", "rnn_relu", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"), _RECURRENT
    ),
}


def followed(name: str) -> frozenset[str]:
    """The flags that a native opcode, or an operator overload such as ``aten.mm.default``, may have."""
    parts = name.split(".")
    bare = parts[1] if len(parts) == 3 and parts[0] == "aten" else name
    return FOLLOWS.get(bare, frozenset())


def concerned(flags: Iterable[str], name: str, dtypes: Collection[DType]) -> tuple[str, ...]:
    """Those of `flags` that the operator `name` follows with operands of these dtypes, sorted."""
    follows = followed(name)
    return tuple(sorted([f for f in flags if f in follows and not DTYPES[f].isdisjoint(dtypes)]))
