"""More models, formats of weights, and several devices: vLLM on "cuda" against Transformers on the CPU."""

import json

import pytest
import torch

from integrations.vllm.tests import random_models
from integrations.vllm.tests.test_generate import ALIKE, LONG, NGRAMS, PROMPTS, continued, local

pytestmark = [pytest.mark.slow, pytest.mark.connected, pytest.mark.timeout(1200)]
#: Formats that also round activations to eight bits. The others keep them.
ROUNDED = ("fp8", "fp8-blocks", "compressed-int8", "compressed-fp8")

#: For such a format or another: median of the differences, and what nine in ten do not exceed. A token whose experts are nearly
#: equal may get other experts, which moves its probability much further.
PRECISION = {True: (4e-3, 0.02), False: (2e-4, 1e-3)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a model of `random_models`."""
    made = {}

    def save(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            random_models.save(made[name], name)
        return made[name]

    return save


def differences(found, *models):
    """Absolute differences of an engine's log probabilities from those of a model, or of one per prompt, in order of size."""
    result, models = [], models if len(models) > 1 else models * len(PROMPTS)
    for prompt, tokens, rows, model in zip(PROMPTS, found["tokens"], found["logprobs"], models, strict=True):
        with torch.no_grad():
            want = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
        result += [abs(p - want[at, int(t)].item()) for at, row in enumerate(rows) for t, p in row.items()]
    return sorted(result)


@pytest.mark.parametrize("name", [name for name in random_models.MODELS if name != "qwen3next"])
def test_experts_latent_attention_and_states_equal_transformers(stack, saved, name):
    found, plain = stack.cases(saved(name), "model"), local(saved(name))
    assert found["greedy"] == continued(plain, PROMPTS)
    assert found["alike"] == continued(plain, ALIKE)
    assert name in random_models.WITH_STATES or found["prefix"]["vllm:prefix_cache_hits"] >= 2 * 96


def off_answers(found, plain, prompts):
    """Absolute differences of log probabilities of answers from those of a model that computes each answer at once."""
    result = []
    for prompt, tokens, rows in zip(prompts, found["tokens"], found["logprobs"], strict=True):
        with torch.no_grad():
            want = plain(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 :].log_softmax(-1)
        result += [abs(row[str(t)] - want[at, t].item()) for at, (t, row) in enumerate(zip(tokens, rows, strict=True))]
    return sorted(result)


@pytest.mark.parametrize("runner", ["1", "0"], ids=["runner-v2", "runner-v1"])
@pytest.mark.parametrize("how", ["cached", "speculation", "cached-speculation"])
@pytest.mark.parametrize("name", ["mamba2", "granite-hybrid"])
def test_cached_prefixes_and_speculation_with_states_equal_transformers(stack, saved, name, how, runner):
    options = {"enable_prefix_caching": "cached" in how}
    if "speculation" in how:
        options["speculative_config"] = NGRAMS

    def states():
        return stack.cases(saved(name), "states", json.dumps(options), VLLM_USE_V2_MODEL_RUNNER=runner)

    if "speculation" in how and (name, runner) == ("mamba2", "0"):
        with pytest.raises(AssertionError, match="runner V1, which does not count accepted tokens"):
            states()
        return
    found = states()
    assert off_answers(found, local(saved(name)), [*LONG, *PROMPTS, *LONG])[-1] < 1e-4
    assert (found["counted"]["vllm:prefix_cache_hits"] >= 5 * 192) == ("cached" in how)
    assert (found["counted"].get("vllm:spec_decode_num_accepted_tokens", 0) > 100) == ("speculation" in how)


@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_cached_prefixes_of_the_first_mamba_equal_transformers(stack, saved, name):
    found = stack.cases(saved(name), "states", json.dumps({"enable_prefix_caching": True}))
    assert off_answers(found, local(saved(name)), [*LONG, *PROMPTS, *LONG])[-1] < 1e-4
    assert found["counted"]["vllm:prefix_cache_hits"] >= 5 * 192


def test_linear_attention_is_near_transformers(stack, saved):
    """vLLM's kernels of gated delta rules compute only in half precision."""
    folder = saved("qwen3next")
    off = differences(stack.cases(folder, "compared", json.dumps({"dtype": "bfloat16"})), local(folder))
    assert off[len(off) // 2] < 2e-3 and off[int(len(off) * 0.9)] < 0.01


def test_cached_prefixes_and_speculation_with_linear_attention_are_near_transformers(stack, saved):
    folder = saved("qwen3next")
    options = {"dtype": "bfloat16", "enable_prefix_caching": True, "speculative_config": NGRAMS}
    found = stack.cases(folder, "states", json.dumps(options))
    off = off_answers(found, local(folder), [*LONG, *PROMPTS, *LONG])
    assert off[len(off) // 2] < 2e-3 and off[int(len(off) * 0.9)] < 0.01
    assert found["counted"]["vllm:prefix_cache_hits"] >= 5 * 192
    assert found["counted"]["vllm:spec_decode_num_accepted_tokens"] > 100


def test_chunked_prefill_with_latent_attention_equals_transformers(stack, saved):
    folder = saved("deepseek2")
    assert stack.cases(folder, "chunked")["alike"] == continued(local(folder), ALIKE)


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_server_with_two_devices_equals_transformers(two_devices, model, kind):
    options = json.dumps({f"{kind}_parallel_size": 2})
    found = two_devices.cases(model, "several", options, WOOLYAI_GPU_COUNT="2")
    assert found["greedy"] == continued(local(model), PROMPTS) and found["graphs"] == "FULL_DECODE_ONLY"


@pytest.mark.parametrize("form", random_models.FORMATS)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_quantised_weights_mean_what_their_format_says(stack, model, saved, tmp_path, name, form):
    random_models.quantise(model if name == "llama" else saved(name), form, tmp_path / form)
    found = stack.cases(tmp_path / form, "compared", json.dumps({"dtype": "float16"}))
    off = differences(found, local(tmp_path / form / "plain"))
    usual, most = PRECISION[form in ROUNDED]
    assert off[len(off) // 2] < usual and off[int(len(off) * 0.9)] < most


@pytest.mark.parametrize("name", ["llama", "deepseek2"])
def test_cache_of_eight_bits(stack, model, saved, name):
    folder = model if name == "llama" else saved(name)
    options = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    off = differences(stack.cases(folder, "compared", json.dumps(options)), local(folder))
    assert 1e-4 < off[len(off) // 2] < 4e-3 and off[int(len(off) * 0.9)] < 0.02


def adapted(stack, folder, plain, tmp_path, options):
    """What a server with two adapters gave for each prompt, and the models whose weights were changed by the adapters."""
    for k in (1, 2):
        random_models.adapt(plain, tmp_path / f"adapter{k}", k)
    found = stack.cases(folder, "adapted", json.dumps(options), tmp_path / "adapter1", tmp_path / "adapter2")
    base, first, second = local(plain), *(local(tmp_path / f"adapter{k}" / "merged") for k in (1, 2))
    off = differences(found, base)
    assert off[len(off) // 2] > 0.01  # the adapters matter
    return found, [base, first, second, first]


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe"])
def test_adapters_of_experts_equal_changed_weights(stack, saved, tmp_path, name):
    found, models = adapted(stack, saved(name), saved(name), tmp_path, {})
    want = [continued(model, [prompt], 8)[0] for model, prompt in zip(models, PROMPTS, strict=True)]
    assert found["tokens"] == want and differences(found, *models)[-1] < 1e-4


@pytest.mark.parametrize(
    ("name", "form"),
    [("llama", form) for form in ("awq", "gptq4", "fp8", "compressed-int8")]
    + [("mixtral", form) for form in ("awq", "fp8", "compressed-int4")],
)
def test_adapters_over_quantised_weights_equal_changed_weights(stack, model, saved, tmp_path, name, form):
    random_models.quantise(model if name == "llama" else saved(name), form, tmp_path / form)
    found, models = adapted(stack, tmp_path / form, tmp_path / form / "plain", tmp_path, {"dtype": "float16"})
    off = differences(found, *models)
    usual, most = PRECISION[form in ROUNDED]
    assert off[len(off) // 2] < usual and off[int(len(off) * 0.9)] < most


def test_experts_of_four_bit_floats_mean_what_their_format_says(stack, saved, tmp_path):
    random_models.pack_experts(saved("gpt-oss"), tmp_path / "packed")
    found = stack.cases(tmp_path / "packed", "compared", json.dumps({"dtype": "bfloat16"}))
    off = differences(found, local(tmp_path / "packed" / "plain"))
    others = differences(found, local(saved("gpt-oss")))
    assert (
        off[len(off) // 2] < 4e-3 and off[int(len(off) * 0.9)] < 0.02 and others[len(off) // 2] > 2 * off[len(off) // 2]
    )
