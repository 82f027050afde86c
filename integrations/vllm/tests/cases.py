"""Generates with vLLM in one process, and prints what each case gave as a line of JSON. `test_generate.py` runs it under Wooly.

Arguments: the folder of the model, the name of the group of cases, and the folders of two adapters.
"""

import itertools
import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the cases look at the session, which is the engine's

import torch
from vllm import LLM, SamplingParams
from vllm.config.reasoning import ReasoningConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

PROMPTS = [list(range(k, 9 * k)) for k in (1, 2, 3, 4)]
#: Prompts that begin with the same hundred tokens.
ALIKE = [[*range(1, 101), k, k + 1] for k in range(3)]
#: The same with two hundred tokens, more than a block of a model with states has.
LONG = [[*range(1, 201), k, k + 1] for k in range(3)]
#: Tokens of answers with few different tokens, in which drafts of n-grams are often right.
LETTERS = [3, 4, 9]
NEW_TOKENS = 16

NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def engine(folder, **more):
    sizes = {
        "dtype": "float32",
        "max_model_len": 256,
        "kv_cache_memory_bytes": 32 << 20,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 16,
    }
    return LLM(model=folder, seed=0, **sizes | more)


def tokens(llm, prompts=PROMPTS, n=NEW_TOKENS, lora_request=None, **sampling):
    params = SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, **{"temperature": 0} | sampling)
    asked = [{"prompt_token_ids": p} for p in prompts]
    return [
        list(o.outputs[0].token_ids) for o in llm.generate(asked, params, use_tqdm=False, lora_request=lora_request)
    ]


def counted(llm, *names):
    return {m.name: m.value for m in llm.get_metrics() if m.name in names}


def general(folder):
    thoughts = ReasoningConfig(reasoning_start_str="<t>", reasoning_end_str="</t>")
    llm = engine(folder, disable_log_stats=False, reasoning_config=thoughts)
    yield "greedy", tokens(llm)
    yield "alike", [tokens(llm, [p])[0] for p in ALIKE]
    yield "prefix", counted(llm, "vllm:prefix_cache_hits")
    beams = llm.beam_search([{"prompt_token_ids": p} for p in PROMPTS[:2]], BeamSearchParams(3, 6, ignore_eos=True))
    yield "beams", [list(b.sequences[0].tokens) for b in beams]
    seeded = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 3}
    yield "seeded", [tokens(llm, n=8, **seeded) for _ in range(2)]
    yield "allowed", tokens(llm, n=8, allowed_token_ids=[3, 4, 5])
    yield "biased", tokens(llm, n=4, logit_bias={5: 100.0})
    yield "penalised", tokens(llm, n=8, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2)
    encode = llm.get_tokenizer().encode
    yield "budget", {"end": encode("</t>"), "tokens": tokens(llm, [encode("Hi<t>")], thinking_token_budget=3)[0]}
    structured = [
        StructuredOutputsParams(regex="[ab]{3,5}"),
        StructuredOutputsParams(choice=["yes", "no"]),
        StructuredOutputsParams(json={"enum": ["left", "right"]}),
    ]
    params = [SamplingParams(temperature=0, max_tokens=8, structured_outputs=s) for s in structured]
    yield "structured", [o.outputs[0].text for o in llm.generate(["Hello"] * 3, params, use_tqdm=False)]
    params = SamplingParams(
        temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2, ignore_eos=True, detokenize=False
    )
    found = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    yield (
        "logprobs",
        [
            [
                {t: p.logprob for t, p in (at or {}).items()}
                for at in [*o.prompt_logprobs, *o.outputs[0].logprobs]
            ]
            for o in found
        ],
    )  # fmt: skip


def compared(folder, options="{}"):
    """The logarithms of the probabilities of prompts and answers, for comparison with another engine."""
    yield from probabilities(engine(folder, **json.loads(options)))


def probabilities(llm, prompts=PROMPTS, lora_request=None, **sampling):
    """Without `sampling`, also of the tokens of prompts, which are computed without cached prefixes then."""
    wanted = {"temperature": 0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(**wanted, prompt_logprobs=0) if not sampling else SamplingParams(**wanted | sampling)
    asked = [{"prompt_token_ids": p} for p in prompts]
    found = llm.generate(asked, params, use_tqdm=False, lora_request=lora_request)
    yield "tokens", [list(o.outputs[0].token_ids) for o in found]
    rows = [[*(o.prompt_logprobs or ())[1:], *o.outputs[0].logprobs] for o in found]
    yield "logprobs", [[{t: p.logprob for t, p in at.items()} for at in row] for row in rows]


def model(folder):
    llm = engine(folder, disable_log_stats=False)
    yield "greedy", tokens(llm)
    yield "alike", [tokens(llm, [p])[0] for p in ALIKE]
    yield "prefix", counted(llm, "vllm:prefix_cache_hits")


def states(folder, options):
    """Long prompts with a common begin, one after the other, then with others; answers of few tokens, which begin new blocks."""
    llm = engine(folder, disable_log_stats=False, **json.loads(options))
    few = {"max_tokens": 48, "allowed_token_ids": LETTERS}
    alone = [dict(probabilities(llm, prompts=[p], **few)) for p in LONG]
    together = dict(probabilities(llm, prompts=[*PROMPTS, *LONG], **few))
    for name in ("tokens", "logprobs"):
        yield name, [*(one[name][0] for one in alone), *together[name]]
    names = "vllm:prefix_cache_hits", "vllm:spec_decode_num_accepted_tokens"
    yield "counted", counted(llm, *names)


def several(folder, options):
    """A server with several devices."""
    llm = engine(folder, **json.loads(options))
    yield "greedy", tokens(llm)
    yield "graphs", llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name


def chunked(folder):
    llm = engine(folder, max_num_batched_tokens=48, max_num_seqs=8, enable_prefix_caching=False)
    yield "alike", tokens(llm, ALIKE)


def ahead(folder):
    """What many steps under way could change: ends, structured outputs beside others, and requests that leave the device."""
    llm = engine(folder, max_num_batched_tokens=64, kv_cache_memory_bytes=1 << 19, disable_log_stats=False)
    for _ in range(2):  # once, the steps' time is unknown
        yield "greedy", tokens(llm, n=48)
    params = {"temperature": 0, "ignore_eos": True}
    asked = [
        SamplingParams(max_tokens=1, **params),
        SamplingParams(max_tokens=40, **params),
        SamplingParams(max_tokens=40, allowed_token_ids=LETTERS, stop_token_ids=LETTERS[:1], temperature=1.0, seed=3),
        SamplingParams(max_tokens=24, temperature=0, structured_outputs=StructuredOutputsParams(regex="[ab]{9,20}")),
        SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True),
    ]
    prompts = [{"prompt_token_ids": p} for p in (*PROMPTS, ALIKE[0])]
    for k in range(2):
        yield f"mixed-{k}", [list(o.outputs[0].token_ids) for o in llm.generate(prompts, asked, use_tqdm=False)]
    yield "full", tokens(llm, [[*range(k, k + 40)] for k in range(10)], n=100)
    yield "preemptions", counted(llm, "vllm:num_preemptions")
    core = llm.llm_engine.engine_core.engine_core
    yield "steps", core.steps_ahead.wanted()


def speculative(folder):
    llm = engine(folder, speculative_config=NGRAMS, disable_log_stats=False)
    yield "greedy", tokens(llm)
    yield "accepted", counted(llm, "vllm:spec_decode_num_accepted_tokens")


def pooled(folder):
    llm = engine(folder, runner="pooling")
    found = llm.embed([{"prompt_token_ids": p} for p in PROMPTS], use_tqdm=False)
    yield "embeddings", [o.outputs.embedding for o in found]


def adapters(folder, *adapters):
    llm = engine(folder, enable_lora=True, max_loras=2, max_lora_rank=8)
    first, second = [LoRARequest(f"adapter{k}", k, path) for k, path in enumerate(adapters, 1)]
    yield "base", tokens(llm)
    yield "first", tokens(llm, lora_request=first)
    yield "together", tokens(llm, lora_request=[first, second, first, second])


def adapted(folder, options, *adapters):
    """Four prompts in one batch: without an adapter, with the first one, with the second one, and with the first one."""
    llm = engine(folder, enable_lora=True, max_loras=2, max_lora_rank=8, **json.loads(options))
    first, second = [LoRARequest(f"adapter{k}", k, path) for k, path in enumerate(adapters, 1)]
    yield from probabilities(llm, lora_request=[None, first, second, first])


def sleep(folder):
    llm = engine(folder, enable_sleep_mode=True)
    yield "greedy", tokens(llm)
    real, taken = torch.accelerator.get_memory_info, itertools.count(1)

    def less_each_time(*device):
        """As if other sessions took memory meanwhile."""
        free, total = real(*device)
        return max(0, free - (next(taken) << 30)), total

    torch.accelerator.get_memory_info = less_each_time
    for level in (1, 2):
        awake = torch.cuda.memory_allocated()
        llm.sleep(level)
        yield f"memory{level}", [awake, torch.cuda.memory_allocated()]
        llm.wake_up()
        if level == 2:
            llm.collective_rpc("reload_weights")
        yield f"woken{level}", tokens(llm)


def quota(folder):
    """The cache takes what the session's quota leaves."""
    llm = engine(folder, kv_cache_memory_bytes=None, gpu_memory_utilization=0.5)
    free, total = torch.cuda.mem_get_info()
    yield "memory", {"allocated": torch.cuda.memory_allocated(), "free": free, "total": total}
    yield "greedy", tokens(llm)


if __name__ == "__main__":
    folder, group, *more = sys.argv[1:]
    for name, result in globals()[group](folder, *more):
        print(json.dumps({name: result}), flush=True)
