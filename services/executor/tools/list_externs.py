"""Writes the allow-list of `extern` from the schemas of the installed torch: `python list_externs.py > extern_ops.txt`.

An operator is listed when the CPU has a kernel for it (or it is one of the composites that travel whole), works on dense tensors
alone, and neither makes storages nor reads anything but its arguments. Denied is what is not listed.
"""

from __future__ import annotations

import re

import torch

WHOLE = re.compile(
    r"^(clone|_grouped_mm|convolution|convolution_backward|native_dropout|embedding|linalg_lstsq|linear|range|kaiser_window|rms_norm"
    r"|cross_entropy_loss|abs_?|logical_(not|and|or|xor)_?|_scaled_dot_product_attention_math|(gru|lstm|rnn_tanh|rnn_relu)(_cell)?|_foreach_\w+)$"
)
#: Storage surgery, other layouts, packed or quantised weights, nested tensors, raw metadata, host-only or unchecked internals.
DENIED = re.compile(
    r"sparse|mkldnn(?!_rnn_layer)|(?<!fake_)quantiz|qint|fbgemm|nested|jagged|_cslt|_weight_int|(?<!^_)int_mm|int4|int8|packed|pack_"
    r"|^set_|set_data|^resize|^as_strided|^_?empty|^new_empty|storage|^_copy_from|^copy_$|_local_scalar_dense|^record_stream"
    r"|^data$|pin_memory|^from_file|^_fw_primal|^_make_dual|_test_|_cudnn|^cudnn|miopen|_mps|xnnpack|^_coalesce|^to_"
    r"|^_?indices$|^_?values$|^crow_|^ccol_|^col_indices|^row_indices|^_nnz|^_dim[IV]|^_assert|^_async_error|^sym_|^_functional_sym|^_cufft"
    r"|^_efficientzero|^_make_dep|^is_|^_has|^_version|^retain|^requires_grad|^_debug|^_validate|^_spdiags|^hspmm|^sspaddmm|^_spmm|^_to_|^lift|^_lazy"
    r"|^_unsafe_masked_index|^_thnn_fused|^choose_qparams|^_saturate|^_choose_qparams"
    r"|^unsafe_chunk|^_dyn_quant|^_mixed_dtypes|^_convert_indices|^_compute_linear|^_transform_bias|^_linear_fp16"
    r"|^_nnpack|^_?slow_conv|^q_|^int_repr|^dequantize|^_validate_comp|^_pad_packed"
    r"|^_wrapped|^_scaled_grouped|^_scaled_mm_v2|_conv_depthwise"
)


def names() -> list[str]:
    """The allowed overloads, sorted."""
    found = []
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = qualified.partition("::")
        if namespace != "aten":
            continue
        bare, _, overload = rest.partition(".")
        packet = getattr(torch.ops.aten, bare, None)
        op = getattr(packet, overload or "default", None)
        if not isinstance(op, torch._ops.OpOverload) or DENIED.search(bare):
            continue
        schema = op._schema
        if not schema.is_mutable and any(r.alias_info is not None for r in schema.returns):
            continue  # a view: it never leaves the client
        types = {str(a.type) for a in schema.arguments}
        if any(re.search(r"Storage|Stream|Dimname|__torch__", t) for t in types):
            continue
        if WHOLE.match(bare) or torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CPU"):
            found.append(str(op))
    return sorted(set(found))


if __name__ == "__main__":
    print(f"# {torch.__version__.split('+')[0]}: written by services/executor/tools/list_externs.py")
    print("\n".join(names()))
