"""What the guide calls refused is refused by vLLM's real configuration, with an error that names it."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.connected, pytest.mark.timeout(1200)]
#: For each case of `refusals.py`: what the error names; None: the engine is configured.
NAMED = {
    "experts": None,
    "mamba": None,
    "hybrid": None,
    "latent attention": None,
    "speculation of mamba": ["speculative decoding of the first form of Mamba"],
    "speculation of hybrid": None,
    "adapters of experts": None,
    "divided adapters of experts": ["--fully-sharded-loras", "mixtures of experts"],
    "awq": None,
    "gptq": None,
    "fp8": None,
    "mxfp4": None,
    "modelopt": ["quantised weights in other formats"],
    "fp8 at start": None,
    "cache": ["--kv-cache-dtype"],
    "embeddings as prompts": ["--enable-prompt-embeds"],
    "draft model": ["speculative decoding by other methods than ngram"],
    "transfer": ["--kv-transfer-config"],
    "tensor parallel": ["2 ranks on 1 device", "wooly run --gpus 2"],
    "pipeline parallel": ["2 ranks on 1 device"],
    "data parallel": ["data or context parallelism"],
    "nothing": None,
}


@pytest.fixture(scope="module")
def found(stack, model, tmp_path_factory):
    return stack.printed("refusals.py", tmp_path_factory.mktemp("configurations"), model)


def test_each_case_is_listed(found):
    assert list(found) == list(NAMED)


@pytest.mark.parametrize("case", NAMED)
def test_refusal_names_the_part(found, case):
    words = NAMED[case]
    if words is None:
        assert found[case] is None
        return
    assert found[case] and "vLLM on Wooly does not support: " in found[case]
    assert all(w in found[case] for w in words), found[case]
