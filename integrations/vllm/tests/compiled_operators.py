"""A library with two of vLLM's operators, in place of vLLM's own, which needs a GPU.

Its results differ from those of `wooly_vllm.operators`, so that a test sees which one ran.
"""

import torch

_LIBRARY = torch.library.Library("_C", "FRAGMENT")


def _operator(schema, function):
    _LIBRARY.define(schema)
    _LIBRARY.impl(schema.partition("(")[0], function, "CPU")


def _gelu_and_mul(out, input):
    out.fill_(7)


_operator("gelu_and_mul(Tensor! out, Tensor input) -> ()", _gelu_and_mul)
_operator(
    "gptq_gemm(Tensor a, Tensor b_q_weight, Tensor b_gptq_qzeros, Tensor b_gptq_scales, bool use_exllama, "
    "bool use_v2_format, int bit) -> Tensor",
    lambda a, *rest: a.new_full((len(a), rest[0].shape[1]), 8),
)
