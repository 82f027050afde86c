"""Common uses of a Hugging Face model in a folder: load it onto the device, generate, save it again."""

import copy
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES, VOCABULARY
from wooly.api import attached_links

pytestmark = pytest.mark.connected

PROMPT = torch.tensor([[5, 17, 20, 3, 91], [8, 8, 30, 59, 4]])
LENGTH = {"max_new_tokens": 10, "min_new_tokens": 10, "pad_token_id": 0}


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *[f"w{n}" for n in range(VOCABULARY - 4)]]
    made = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
    )


@pytest.fixture(scope="module")
def local(tmp_path_factory, tokenizer):
    """A model, its folder, and a folder with the same model in several files."""
    folder = tmp_path_factory.mktemp("model")
    model = ARCHITECTURES["llama"].build(tie_word_embeddings=True).eval()
    for name, size in (("whole", "5GB"), ("sharded", "20KB")):
        model.save_pretrained(folder / name, max_shard_size=size)
        tokenizer.save_pretrained(folder / name)
    assert len(list((folder / "sharded").glob("*.safetensors"))) > 2
    return model, folder / "whole", folder / "sharded"


def loaded(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


@torch.no_grad()
def logits(model):
    return model(PROMPT.to(model.device)).logits.cpu()


PARTS = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")
MAPS = ["cuda", 0, "auto", {"": 0}, dict.fromkeys(PARTS, 0)]
#: Other names of the same device.
MORE_MAPS = ["cuda:0", {"": "cuda"}, torch.device("cuda"), "balanced", "sequential"]


def slow(values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("where", [*MAPS, *slow(MORE_MAPS)], ids=lambda w: str(w)[:20])
def test_load_of_folder_to_device_equals_host(cuda, local, where):
    model, whole, sharded = local
    expected = logits(model)
    for folder in (whole, sharded):
        found = loaded(folder, device_map=where)
        assert {str(t.device) for t in (*found.parameters(), *found.buffers())} == {"cuda:0"}
        assert found.lm_head.weight is found.model.embed_tokens.weight
        assert torch.equal(logits(found), expected)


@pytest.mark.parametrize("dtype", [torch.float16, "auto", *slow([torch.bfloat16, "float16"])], ids=str)
def test_load_of_folder_uses_requested_dtype(cuda, local, dtype):
    _, _, folder = local
    ours, theirs = loaded(folder, device_map="cuda", dtype=dtype), loaded(folder, dtype=dtype)
    assert ours.dtype is theirs.dtype
    assert torch.equal(logits(ours), logits(theirs))


def test_load_uses_no_more_memory_than_the_model(cuda, local, no_garbage):
    _, _, folder = local
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = loaded(folder, device_map="auto")
    size = sum(t.untyped_storage().nbytes() for t in {*model.parameters(), *model.buffers()})
    assert torch.cuda.memory_allocated() - start == size
    assert torch.cuda.max_memory_allocated() - start < 2 * size


def test_device_map_follows_device_memory(cuda, local):
    _, _, folder = local
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total == torch.cuda.get_device_properties(0).total_memory
    most = {0: "60KB", "cpu": "1GB"}
    model = loaded(folder, device_map="auto", max_memory=most)
    assert set(model.hf_device_map.values()) == {0, "cpu"}
    assert torch.equal(logits(model), logits(local[0]))


@pytest.mark.parametrize("place", ["disk", *slow(["cpu"])])
def test_offloaded_layers_are_loaded_when_used(cuda, local, place, tmp_path):
    model, whole, _ = local
    where = dict.fromkeys(PARTS, 0) | {"model.layers.0": place, "model.layers.1": 0}
    del where["model.layers"]
    found = loaded(whole, device_map=where, offload_folder=tmp_path)
    assert {p.device.type for p in found.model.layers[0].parameters()} == {"meta"}
    assert torch.equal(logits(found), logits(model))


def test_save_from_device_writes_same_files(cuda, local, tmp_path):
    _, _, folder = local
    loaded(folder, device_map="cuda").save_pretrained(tmp_path / "ours", max_shard_size="20KB")
    loaded(folder).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    files = sorted(p.name for p in (tmp_path / "theirs").iterdir())
    assert sorted(p.name for p in (tmp_path / "ours").iterdir()) == files and len(files) > 4
    assert [f for f in files if (tmp_path / "ours" / f).read_bytes() != (tmp_path / "theirs" / f).read_bytes()] == []


def offloaded_to_host(model):
    from accelerate import cpu_offload

    cpu_offload(model, torch.device("cuda"))


def offloaded_to_disk(model, folder):
    from accelerate import disk_offload

    disk_offload(model, folder, torch.device("cuda"))


def dispatched(model):
    from accelerate import dispatch_model, infer_auto_device_map

    plan = infer_auto_device_map(model, max_memory={0: "60KB", "cpu": "1GB"})
    assert set(plan.values()) == {0, "cpu"}
    dispatch_model(model, plan)


@pytest.mark.parametrize("how", [offloaded_to_host, offloaded_to_disk, dispatched])
def test_accelerate_offload_runs_too_large_model(cuda, local, how, tmp_path):
    model = copy.deepcopy(local[0])
    how(model, tmp_path) if how is offloaded_to_disk else how(model)
    with torch.no_grad():
        found = model(PROMPT).logits
    assert torch.equal(found.cpu(), logits(local[0]))


# -- generation --------------------------------------------------------------------------------------------------------


def both(name, **options):
    """Results of `generate` of one architecture on the device and on the host."""
    architecture = ARCHITECTURES[name]
    theirs = architecture.build().eval()
    ours = copy.deepcopy(theirs).to("cuda")
    inputs = {k: v for k, v in architecture.inputs().items() if k != "labels"}
    if architecture.family not in ("encoder-decoder", "speech"):
        inputs = {"input_ids": PROMPT, "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])}

    def run(model):
        return model.generate(**{k: v.to(model.device) for k, v in inputs.items()}, **LENGTH, **options)

    return run(ours), run(theirs)


#: Each has another kind of cache. The slow ones add models with the same kinds of caches.
GENERATORS = ("llama", "mamba", "t5")
MORE_GENERATORS = ("gemma2", "gpt2", "bloom", "mixtral", "jamba", "bart", "whisper")
#: `generate` warns that these two lengths differ from the model's defaults.
NOISE = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")


@NOISE
@pytest.mark.parametrize("name", [*GENERATORS, *slow(MORE_GENERATORS)])
def test_greedy_generation_equals_cpu_tokens(cuda, name):
    ours, theirs = both(name, do_sample=False)
    assert ours.is_cuda and torch.equal(ours.cpu(), theirs)


@NOISE
@pytest.mark.parametrize("name", ["llama", *slow(["t5", "mixtral", "mamba", "whisper"])])
def test_beam_search_equals_cpu_tokens_and_scores(cuda, name):
    more = {"num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
    ours, theirs = both(name, do_sample=False, num_beams=3, **more)
    assert torch.equal(ours.sequences.cpu(), theirs.sequences)
    assert torch.equal(ours.sequences_scores.cpu(), theirs.sequences_scores)


@NOISE
@pytest.mark.parametrize("name", ["llama", *slow(["t5"])])
def test_penalties_and_forbidden_words_equal_cpu_tokens(cuda, name):
    ours, theirs = both(name, do_sample=False, repetition_penalty=1.3, no_repeat_ngram_size=2, bad_words_ids=[[7], [9]])
    assert torch.equal(ours.cpu(), theirs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@NOISE
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_static_cache_compiles_and_equals_cpu_tokens(cuda, name):
    from torch._dynamo.utils import counters  # takes two seconds to import

    torch._dynamo.reset()
    architecture = ARCHITECTURES[name]
    theirs = architecture.build().eval()
    ours = copy.deepcopy(theirs).to("cuda")
    counters.clear()
    found = ours.generate(PROMPT.to("cuda"), **LENGTH, do_sample=False, cache_implementation="static")
    assert counters["stats"]["unique_graphs"] > 0  # generation compiles the one-token step, on CUDA only
    assert torch.equal(found.cpu(), theirs.generate(PROMPT, **LENGTH, do_sample=False))
    torch._dynamo.reset()


@pytest.mark.parametrize("beams", [1, *slow([2])])
def test_sampling_depends_only_on_seed(cuda, local, beams):
    model = loaded(local[1], device_map="cuda")

    def sample(seed):
        torch.manual_seed(seed)
        options = {"do_sample": True, "temperature": 1.5, "top_k": 40, "top_p": 0.95, "num_beams": beams}
        return model.generate(PROMPT.to("cuda"), **LENGTH, **options).tolist()

    first = sample(3)
    assert first == sample(3) != sample(4)
    assert [row[:5] for row in first] == PROMPT.tolist() and {len(row) for row in first} == {15}
    assert all(0 <= token < VOCABULARY for row in first for token in row)


def test_samples_follow_the_probabilities(cuda, local):
    model = loaded(local[1], device_map="cuda")
    with torch.no_grad():
        likely = model(PROMPT[:1].to("cuda")).logits[0, -1].mul(4).softmax(-1).cpu()
    torch.manual_seed(0)
    many = PROMPT[:1].to("cuda").expand(4000, -1).contiguous()
    drawn = model.generate(many, max_new_tokens=1, do_sample=True, temperature=0.25, top_k=0, pad_token_id=0)[:, -1]
    share = torch.bincount(drawn.cpu(), minlength=VOCABULARY) / 4000
    assert (share - likely).abs().max() < 0.03


@pytest.mark.parametrize("helper", ["prompt", *slow(["model"])])
def test_assisted_generation_equals_cpu_tokens(cuda, local, helper):
    def run(device):
        model = loaded(local[1], device_map=device)
        guess = {"prompt_lookup_num_tokens": 2} if helper == "prompt" else {"assistant_model": copy.deepcopy(model)}
        return model.generate(PROMPT[:1].to(device), **LENGTH, do_sample=False, **guess).cpu()

    assert torch.equal(run("cuda"), run("cpu"))


def test_streamed_words_equal_complete_text(cuda, local, tokenizer):
    from transformers import TextIteratorStreamer

    model = loaded(local[1], device_map="cuda")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    inputs = tokenizer("w1 w5 w9", return_tensors="pt", return_token_type_ids=False)
    options = {**LENGTH, "do_sample": False}
    thread = threading.Thread(target=model.generate, kwargs={**inputs.to("cuda"), **options, "streamer": streamer})
    thread.start()
    words = list(streamer)
    thread.join()
    whole = local[0].generate(**inputs.to("cpu"), **options)[0, 3:]
    assert "".join(words) == tokenizer.decode(whole) and len(words) > 5


@pytest.mark.parametrize("where", ["cuda", None, *slow([0, "cuda:0", torch.device("cuda")])], ids=str)
def test_pipeline_equals_cpu_text(cuda, local, where):
    from transformers import pipeline

    prompts, options = ["w1 w5 w9", "w3"], {**LENGTH, "do_sample": False, "batch_size": 2}
    ours = pipeline("text-generation", model=str(local[2]), **({} if where is None else {"device": where}))
    assert ours.device.type == ours.model.device.type == "cuda"  # also by default, as on CUDA
    theirs = pipeline("text-generation", model=str(local[2]), device="cpu")
    assert ours(prompts, **options) == theirs(prompts, **options)


@pytest.mark.parametrize("sampling", [False, *slow([True])], ids=["greedy", "sampling"])
def test_late_stop_check_does_not_change_results(cuda, local, sampling):
    from transformers.generation import utils
    from wooly.facade import generation

    options = {"max_new_tokens": 16, "pad_token_id": 0, "do_sample": sampling}
    model = loaded(local[1], device_map="cuda")
    torch.cuda.manual_seed(3)  # as below, so that the sequences are the same until they end
    free = model.generate(PROMPT.to("cuda"), **options, eos_token_id=None).tolist()
    ends = sorted({row[12] for row in free})  # each sequence ends in the middle, at the same step or not
    link = attached_links()[0]

    def run():
        torch.cuda.manual_seed(3)
        before = link.syncs
        out = model.generate(PROMPT.to("cuda"), **options, eos_token_id=ends)
        return out.cpu(), torch.cuda.get_rng_state(), torch.rand(3, device="cuda").cpu(), link.syncs - before

    assert hasattr(utils.DeferredStopCheck, "wooly_replaces")
    late = run()
    generation.deactivate()
    try:
        assert not hasattr(utils.DeferredStopCheck, "wooly_replaces")
        direct = run()
    finally:
        generation.activate()
    assert direct[0].shape[1] < 21 and all(torch.equal(a, b) for a, b in zip(late[:3], direct[:3], strict=True))
    assert late[3] <= direct[3] + 2  # one answer per token in both cases, without a wait for the last one
    if not sampling:
        assert torch.equal(late[0], local[0].generate(PROMPT, **options, eos_token_id=ends))
    # A returned cache must not contain an additional step.
    kept = model.generate(PROMPT.to("cuda"), **options, eos_token_id=ends, return_dict_in_generate=True)
    assert kept.past_key_values.get_seq_length() == kept.sequences.shape[1] - 1


def test_generation_with_a_cache_of_tuples_equals_cpu_tokens(cuda, local):
    from transformers import DynamicCache, LlamaForCausalLM

    class WithTuples(LlamaForCausalLM):
        """Keeps keys and values as tuples, as models did before Transformers had caches."""

        def prepare_inputs_for_generation(self, ids, past_key_values=None, **kwargs):
            if isinstance(past_key_values, tuple):
                return {"input_ids": ids[:, -1:], "past_key_values": past_key_values}
            return {"input_ids": ids, "past_key_values": None}

        def forward(self, input_ids, past_key_values=None, **kwargs):
            cache = DynamicCache(past_key_values or ())
            out = super().forward(input_ids, past_key_values=cache, use_cache=True)
            out.past_key_values = tuple((layer.keys, layer.values) for layer in cache.layers)
            return out

    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    model = WithTuples(local[0].config).eval()
    model.load_state_dict(local[0].state_dict())
    expected = model.generate(PROMPT, **options)
    assert torch.equal(model.to("cuda").generate(PROMPT.to("cuda"), **options).cpu(), expected)


def _far(monkeypatch):
    """Pretend that the executor is far away. Answers are read only if too many are missing, or at the end."""
    from wooly.facade.streams import Event
    from wooly.waits import Waits

    class FarWaits(Waits):
        trip_s = property(lambda self: 3600.0, lambda self, shorter: None)

    monkeypatch.setattr(attached_links()[0], "waits", FarWaits())
    monkeypatch.setattr(Event, "query", lambda self: False)


class _Words:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.got = []

    def put(self, value):
        self.got.append(value.tolist())

    def end(self):
        self.got.append("end")


def test_steps_under_way_grow_until_waits_make_steps_no_shorter():
    from wooly.facade.generation import MOST_LATE, steps_late

    trip, computing = 20.0, 2.5
    late, seen = 1, []
    for _ in range(20):
        late = steps_late(trip, max(computing, (trip + computing) / late))
        seen.append(late)
    assert seen == sorted(seen) and seen[-1] == (trip + computing) / computing
    assert steps_late(0.1, 3.0) == steps_late(1.0, 3.0) == steps_late(20.0, None) == 1
    assert steps_late(20.0, 30.0) == 2 and steps_late(500.0, 1.0) == MOST_LATE


@pytest.mark.parametrize("late", [4, 24])
@pytest.mark.parametrize("ending", ["tokens", "length"])
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
def test_far_stop_check_undoes_many_steps(cuda, local, monkeypatch, sampling, ending, late):
    from wooly.facade import generation

    monkeypatch.setattr(generation, "MOST_LATE", late)

    options = {"max_new_tokens": 20, "pad_token_id": 0, "do_sample": sampling}
    model = loaded(local[1], device_map="cuda")
    torch.cuda.manual_seed(3)
    free = model.generate(PROMPT[:1].to("cuda"), **options, eos_token_id=None)[0].tolist()
    ends = free[10] if ending == "tokens" else None
    steps, counted = [], generation.steps_late
    monkeypatch.setattr(generation, "steps_late", lambda *args: steps.append(counted(*args)) or steps[-1])

    def run():
        torch.cuda.manual_seed(3)
        streamer = _Words()
        out = model.generate(PROMPT[:1].to("cuda"), **options, eos_token_id=ends, streamer=streamer)
        return out.tolist(), streamer.got, torch.cuda.get_rng_state().tolist(), torch.rand(3, device="cuda").tolist()

    near = run()
    _far(monkeypatch)
    steps.clear()
    assert run() == near
    made = len(near[0][0]) - 5
    assert max(steps) == late and len(steps) == min(20, made + late if ending == "tokens" else 20)
    assert near[0][0] == free[: made + 5] and (made < 20) == (ending == "tokens")


def test_only_one_step_is_prepared_if_the_users_code_takes_part(cuda, local, monkeypatch):
    from transformers import LogitsProcessorList
    from wooly.facade import generation

    model = loaded(local[1], device_map="cuda")
    _far(monkeypatch)
    calls, positions = [], []
    begin = generation._positions_of
    monkeypatch.setattr(generation, "_positions_of", lambda *args: positions.append(begin(*args)) or positions[-1])
    free = model.generate(PROMPT[:1].to("cuda"), **LENGTH, do_sample=False)[0].tolist()
    options = {"max_new_tokens": 10, "pad_token_id": 0, "do_sample": False, "eos_token_id": free[9]}

    def note(ids, scores):
        calls.append(ids.shape[1])
        return scores

    out = model.generate(PROMPT[:1].to("cuda"), **options, logits_processor=LogitsProcessorList([note]))[0].tolist()
    assert out == free[: len(out)] and len(calls) <= len(out) - 5 + 1  # at most one step more
    model.generate(
        PROMPT[:1].to("cuda"), **options, prefix_allowed_tokens_fn=lambda batch, ids: list(range(VOCABULARY))
    )
    handle = model.model.layers[0].register_forward_hook(lambda *args: None)
    model.generate(PROMPT[:1].to("cuda"), **options)
    handle.remove()

    class Own(type(model)):
        pass

    model.__class__ = Own
    model.generate(PROMPT[:1].to("cuda"), **options)
    assert positions[0] > 0 and positions[1:] == [0, 0, 0, 0]


def test_no_step_beyond_the_models_positions_is_prepared(cuda, monkeypatch):
    architecture = ARCHITECTURES["gpt2"]
    theirs = architecture.build().eval()
    most = theirs.config.max_position_embeddings
    prompt = torch.arange(most - 8).remainder(VOCABULARY).unsqueeze(0)
    whole = theirs.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist()
    options = {"max_new_tokens": 40, "pad_token_id": 0, "do_sample": False, "eos_token_id": whole[-1]}
    expected = theirs.generate(prompt, **options)
    assert expected.shape[1] <= most
    ours = copy.deepcopy(theirs).to("cuda")
    _far(monkeypatch)
    found = ours.generate(prompt.to("cuda"), **options)
    torch.cuda.synchronize()  # a step beyond the positions would fail
    assert torch.equal(found.cpu(), expected)
