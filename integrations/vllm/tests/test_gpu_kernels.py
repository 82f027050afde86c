"""Every Triton kernel that vLLM launches can be built for GPUs, with Wooly's guards. No GPU is needed for this."""

import json
import re

import pytest

from integrations.vllm.tests import random_models
from integrations.vllm.tests.test_generate import NGRAMS

pytestmark = [pytest.mark.slow, pytest.mark.connected, pytest.mark.timeout(3000)]
TARGETS = ("cuda:sm_90", "hip:gfx942")
#: Kernels that a run of the cases must have launched, so that the test cannot pass without them.
EXPECTED = {
    "kernel_unified_attention", "reshape_and_cache_kernel_flash", "fused_moe_kernel", "fused_moe_kernel_gptq_awq",
    "_per_token_quant_int8", "_w8a8_triton_block_scaled_mm", "awq_gemm_kernel", "_fwd_grouped_kernel_stage1",
    "merge_attn_states_kernel", "_copy", "_choose", "_scan", "_make_whole",
}  # fmt: skip


@pytest.fixture(scope="module")
def launched(stack, model, tmp_path_factory):
    """Texts of the kernels of some servers, by name. Equal texts are there once."""
    folder = tmp_path_factory.mktemp("kernels")
    cache = {"TRITON_CACHE_DIR": str(folder / "cache")}
    stack.cases(model, "general", **cache)
    stack.cases(model, "speculative", **cache)
    eight = json.dumps({"dtype": "bfloat16", "kv_cache_dtype": "fp8"})
    stack.cases(model, "compared", eight, **cache)
    for name in ("mixtral", "deepseek2", "granite-hybrid", "qwen3next", "mamba", "gpt-oss"):
        random_models.save(folder / name, name)
    speculates = {"enable_prefix_caching": True, "speculative_config": NGRAMS}
    stack.cases(folder / "granite-hybrid", "states", json.dumps(speculates), **cache)
    stack.cases(folder / "qwen3next", "states", json.dumps({"dtype": "bfloat16"} | speculates), **cache)
    stack.cases(folder / "qwen3next", "compared", json.dumps({"dtype": "bfloat16"}), **cache)
    stack.cases(folder / "mamba", "compared", **cache)
    random_models.pack_experts(folder / "gpt-oss", folder / "packed")
    stack.cases(folder / "packed", "compared", json.dumps({"dtype": "bfloat16"}), **cache)
    stack.cases(folder / "deepseek2", "model", **cache)
    stack.cases(folder / "deepseek2", "compared", eight, **cache)
    for form in ("awq", "gptq8", "fp8-blocks", "compressed-int4", "compressed-int8"):
        random_models.quantise(folder / "mixtral", form, folder / form)
        stack.cases(folder / form, "compared", json.dumps({"dtype": "float16"}), **cache)
    found = {}
    for path in sorted((folder / "cache").glob("*/*.ttir")):
        found.setdefault(path.stem, set()).add(path.read_text())
    return found


def test_cases_launch_what_this_test_is_about(launched):
    assert set(launched) >= EXPECTED


@pytest.mark.parametrize("target", TARGETS)
def test_each_kernel_is_built_for_a_gpu(launched, target):
    from wooly_triton import chips
    from wooly_wis.errors import WisError
    from wooly_wis.languages import Request

    from libs.triton.tests.texts import signature

    failed = {}
    for name, texts in launched.items():
        for text in sorted(texts, key=len)[-2:]:  # the longest ones; the others differ by sizes
            entry, args = signature(text)
            try:
                chips.build(Request(text, entry, args, (1, 1, 1), {"num_warps": 4}), target)
            except WisError as e:
                failed[name] = re.sub(r"\s+", " ", str(e))[:300]
    assert not failed
