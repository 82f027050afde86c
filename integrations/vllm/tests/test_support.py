"""What the plugin refuses, and when it is active. These tests need no vLLM."""

from types import SimpleNamespace

import pytest
from wooly_testkit import forks
from wooly_vllm import support

NGRAM = SimpleNamespace(method="ngram")


def _config(**changed):
    model = {
        "quantization": None,
        "is_hybrid": False,
        "has_inner_state": False,
        "hf_text_config": SimpleNamespace(),
        "is_moe": False,
        "enable_prompt_embeds": False,
        "enable_sleep_mode": False,
    }
    parallel = {
        f"{name}_parallel_size": 1 for name in ("tensor", "pipeline", "data", "prefill_context", "decode_context")
    }
    alone = {
        "cache_dtype": "auto",
        "use_v2_model_runner": True,
        "speculative_config": None,
        "kv_transfer_config": None,
        "lora_config": None,
    }
    parts = alone | model | parallel | changed
    return SimpleNamespace(
        model_config=SimpleNamespace(**{name: parts[name] for name in model}),
        parallel_config=SimpleNamespace(**{name: parts[name] for name in parallel}),
        cache_config=SimpleNamespace(cache_dtype=parts["cache_dtype"]),
        speculative_config=parts["speculative_config"],
        use_v2_model_runner=parts["use_v2_model_runner"],
        kv_transfer_config=parts["kv_transfer_config"],
        lora_config=parts["lora_config"],
    )


def test_plain_configuration_is_supported():
    assert support.unsupported(_config()) == []
    assert support.unsupported(_config(tensor_parallel_size=2, pipeline_parallel_size=2)) == []
    assert support.unsupported(_config(is_hybrid=True, has_inner_state=True)) == []
    assert support.unsupported(_config(is_moe=True, quantization="auto_awq", cache_dtype="fp8")) == []
    assert support.unsupported(_config(speculative_config=NGRAM)) == []
    assert support.unsupported(_config(speculative_config=NGRAM, is_hybrid=True, has_inner_state=True)) == []
    mamba = {"has_inner_state": True, "hf_text_config": SimpleNamespace(model_type="mamba")}
    assert support.unsupported(_config(**mamba, quantization="gpt_oss_mxfp4")) == []
    assert support.unsupported(_config(is_moe=True, lora_config=SimpleNamespace(fully_sharded_loras=False))) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"data_parallel_size": 2}, "data or context parallelism"),
        ({"decode_context_parallel_size": 2}, "data or context parallelism"),
        ({"tensor_parallel_size": 2, "enable_sleep_mode": True}, "sleep mode of a server with several devices"),
        ({"quantization": "modelopt"}, "quantised weights in other formats than AWQ"),
        (
            {"speculative_config": NGRAM, "hf_text_config": SimpleNamespace(model_type="jamba"), "is_hybrid": True},
            "the first form of Mamba",
        ),
        ({"speculative_config": NGRAM, "has_inner_state": True, "use_v2_model_runner": False}, "model runner V1"),
        (
            {"is_moe": True, "tensor_parallel_size": 2, "lora_config": SimpleNamespace(fully_sharded_loras=True)},
            "--fully-sharded-loras",
        ),
        ({"hf_text_config": SimpleNamespace(index_topk=8)}, "sparse latent attention"),
        ({"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ({"cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "other methods than ngram"),
        ({"kv_transfer_config": object()}, "--kv-transfer-config"),
    ],
)
def test_unsupported_part_is_named(changed, words):
    (found,) = support.unsupported(_config(**changed))
    assert words in found


def test_unsupported_parts_are_all_named():
    assert (
        len(support.unsupported(_config(quantization="modelopt", enable_prompt_embeds=True, data_parallel_size=4))) == 3
    )


def test_need_of_8_bit_floats():
    assert not support.needs_fp8(_config(quantization="auto_awq"))
    assert support.needs_fp8(_config(quantization="fp8")) and support.needs_fp8(_config(cache_dtype="fp8_e4m3"))


def test_configuration_without_model_is_checked():
    config = _config()
    config.model_config = config.cache_config = None
    assert support.unsupported(config) == []


def test_adapters_and_sleep_mode_capture_no_graphs():
    assert not support.uncaptured(_config(tensor_parallel_size=2, pipeline_parallel_size=2))
    assert not support.uncaptured(_config())
    assert support.uncaptured(_config(lora_config=object())) == "--enable-lora"
    assert support.uncaptured(_config(enable_sleep_mode=True)) == "--enable-sleep-mode"


def test_release_is_tested_by_its_first_two_numbers():
    assert support.is_tested("0.32.0") and support.is_tested("0.32.1.post1")
    assert not support.is_tested("0.3.2") and not support.is_tested("1.32.0")


def test_plugin_without_wooly_device_names_no_platform(tmp_path):
    """In a process of its own, because other tests may have attached a device to this one."""
    (tmp_path / "asks.py").write_text("import wooly_vllm; print(wooly_vllm.platform_plugin())")
    done = forks.run("asks", like="wooly", cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and done.stdout == "None\n", done.stderr
