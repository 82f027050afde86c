"""Trainer, Accelerate and PEFT on the device: if the arithmetic is the same, losses and weights equal the CPU's in every bit."""

import copy
import gc
import math
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES

pytestmark = [
    pytest.mark.connected,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """Speed up Trainer and Accelerate, which collect garbage often: objects imported so far are excluded from the search."""
    import accelerate
    import peft
    import transformers

    assert accelerate and peft.LoraConfig and transformers.Trainer and transformers.Seq2SeqTrainer
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh():
    """Reset Accelerate's state of the process, which its first user sets (device and precision)."""
    from accelerate.state import AcceleratorState, GradientState

    def reset():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield reset
    reset()


def sequences(count=24):
    """Sequences of numbers that count up, which a model learns fast."""
    starts = torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(11)).tolist()
    rows = [(torch.arange(12) + start) % 90 + 3 for start in starts]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def assert_same_weights(ours, theirs):
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    assert [name for name, t in other.items() if not torch.equal(mine[name].cpu(), t.cpu())] == []


# -- Trainer -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def train(cuda, fresh, tmp_path):
    """Trains a small model with a `Trainer`, and returns the trainer."""
    from transformers import Trainer, TrainingArguments, set_seed
    from transformers.utils import logging

    logging.disable_progress_bar()

    def run(device="cuda", model=None, resume=None, **options):
        fresh()
        set_seed(0)
        settings = {
            "output_dir": str(tmp_path / device),
            "per_device_train_batch_size": 4,
            "max_steps": 6,
            "logging_steps": 1,
            "learning_rate": 5e-3,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": device == "cpu",
        }
        args = TrainingArguments(**settings | options)
        assert args.device.type == device
        model = ARCHITECTURES["llama"].build() if model is None else model
        trainer = Trainer(model=model, args=args, train_dataset=sequences(), eval_dataset=sequences(8))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


def history(trainer, key="loss"):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


OPTIONS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "fused": {"optim": "adamw_torch_fused"},
    "adafactor": {"optim": "adafactor"},
    "smoothing and schedule": {
        "label_smoothing_factor": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_grad_norm": 0.1,
    },
}


#: The slow ones add Trainer's options: Accelerate's loop tests accumulation below, `optimizers.py` tests fused optimizers and
#: schedules.
QUICK = {"plain"}


def options():
    for name, given in OPTIONS.items():
        yield pytest.param(given, id=name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("options", list(options()))
def test_trainer_equals_cpu_losses_and_weights(train, options):
    ours = train(**options)
    found = history(ours), history(ours, "grad_norm"), ours.evaluate()["eval_loss"]
    theirs = train("cpu", **options)
    assert found == (history(theirs), history(theirs, "grad_norm"), theirs.evaluate()["eval_loss"])
    assert_same_weights(ours.model, theirs.model)
    assert len(found[0]) == 6 and found[2] < found[0][0]


BOTH = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}


# Another test below compares bfloat16 with the CPU in every bit.
@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("more", [{}, pytest.param(BOTH, marks=pytest.mark.slow)], ids=["plain", "both"])
def test_trainer_learns_in_mixed_precision(train, precision, more):
    exact = history(train(**more))
    ours = train(**{precision: True}, **more)
    losses = history(ours)
    assert losses != exact and losses == pytest.approx(exact, rel=3e-3)
    assert all(math.isfinite(norm) for norm in history(ours, "grad_norm"))
    assert {p.dtype for p in ours.model.parameters()} == {torch.float32}
    assert (ours.accelerator.scaler is not None) == (precision == "fp16")
    assert ours.evaluate()["eval_loss"] < losses[0]


def test_trainer_with_bfloat16_equals_the_cpu(train):
    assert history(train(bf16=True)) == history(train("cpu", bf16=True))


@pytest.mark.slow  # other tests show that a compiled training is the same; this one adds Trainer's option for it
def test_trainer_compiles_the_model(train):
    assert history(train(torch_compile=True)) == history(train())


def test_trainer_after_resume_equals_uninterrupted_run(train, tmp_path):
    def model():
        made = ARCHITECTURES["gpt2"].build()
        for module in made.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2  # so that the generators' states matter
        return made

    whole = train(model=model(), save_strategy="steps", save_steps=3)
    checkpoint = tmp_path / "cuda" / "checkpoint-3"
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} <= {
        p.name for p in checkpoint.iterdir()
    }
    assert "cuda" in torch.load(checkpoint / "rng_state.pth", weights_only=False)
    resumed = train(model=model(), resume=str(checkpoint))
    assert history(resumed) == history(whole)
    assert_same_weights(resumed.model, whole.model)


def test_trainer_predictions_equal_cpu(cuda, fresh, tmp_path):
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

    def run(device):
        fresh()
        set_seed(0)
        args = Seq2SeqTrainingArguments(
            output_dir=str(tmp_path),
            max_steps=2,
            logging_steps=1,
            use_cpu=device == "cpu",
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            predict_with_generate=True,
            generation_max_length=8,
        )
        model = ARCHITECTURES["t5"].build()
        trainer = Seq2SeqTrainer(model=model, args=args, train_dataset=sequences(), eval_dataset=sequences(8))
        trainer.train()
        found = trainer.predict(sequences(4))
        return history(trainer), found.predictions.tolist(), found.metrics["test_loss"]

    assert run("cuda") == run("cpu")


# -- Accelerate --------------------------------------------------------------------------------------------------------


def loop(fresh, device, model=None, precision="no", accumulate=1, save=None):
    """The training loop of Accelerate's guide. Returns norms and losses, and the parts of the loop."""
    from accelerate import Accelerator

    fresh()
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision, gradient_accumulation_steps=accumulate)
    model = ARCHITECTURES["llama"].build() if model is None else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, data, schedule = accelerator.prepare(
        model, optimizer, DataLoader(sequences(), batch_size=4), schedule
    )
    seen = []
    for batch in data:
        assert batch["input_ids"].device.type == device
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seen.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
    return seen, accelerator, accelerator.unwrap_model(model)


@pytest.mark.parametrize(
    ("precision", "accumulate"),
    [("bf16", 2), *(pytest.param(*both, marks=pytest.mark.slow) for both in (("no", 1), ("no", 2), ("bf16", 1)))],
)
def test_accelerate_equals_cpu_losses_norms_and_weights(cuda, fresh, precision, accumulate):
    ours, accelerator, mine = loop(fresh, "cuda", precision=precision, accumulate=accumulate)
    assert accelerator.device.type == "cuda" and accelerator.num_processes == 1
    theirs, _, other = loop(fresh, "cpu", precision=precision, accumulate=accumulate)
    assert ours == theirs
    assert_same_weights(mine, other)


def test_accelerate_with_float16_scales_gradients(cuda, fresh):
    exact, _, _ = loop(fresh, "cuda")
    seen, accelerator, _ = loop(fresh, "cuda", precision="fp16")
    assert accelerator.scaler.get_scale() >= 65536
    assert seen != exact and seen == pytest.approx(exact, rel=3e-3)


def test_accelerate_saves_and_loads_its_state(cuda, fresh, tmp_path):
    _, accelerator, model = loop(fresh, "cuda")
    accelerator.save_state(tmp_path)
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    numbers = torch.rand(4, device="cuda")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    accelerator.load_state(tmp_path)
    assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.rand(4, device="cuda"), numbers)  # the generator's state was saved, too


def test_accelerate_without_memory_tries_smaller_batches(cuda):
    from accelerate.utils import find_executable_batch_size

    tried = []

    @find_executable_batch_size(starting_batch_size=3)
    def run(size):
        tried.append(size)
        if size > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return size

    assert run() == tried[-1] <= 2 < tried[0]


# -- PEFT --------------------------------------------------------------------------------------------------------------


def adapted(**options):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "gate_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **options)
    return get_peft_model(ARCHITECTURES["llama"].build(), config)


LORA = [
    pytest.param({}, id="plain"),
    pytest.param({"use_rslora": True}, id="rank stabilised", marks=pytest.mark.slow),  # another scaling factor
    pytest.param({"use_dora": True}, id="weight decomposed", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", LORA)
def test_lora_train_save_load_and_merge_equal_cpu(cuda, fresh, tmp_path, options):
    from peft import PeftModel

    ours, _, mine = loop(fresh, "cuda", adapted(**options))
    theirs, _, other = loop(fresh, "cpu", adapted(**options))
    assert ours == theirs and ours[-1] < ours[1]
    assert_same_weights(mine, other)
    prompt = sequences(2)[0]["input_ids"][None]
    mine.save_pretrained(tmp_path)
    for model in (mine, other):
        model.eval()
    with torch.no_grad():
        expected = other(input_ids=prompt).logits
        base = ARCHITECTURES["llama"].build()
        before = base(input_ids=prompt).logits
        loaded = PeftModel.from_pretrained(base.to("cuda"), tmp_path).eval()
        assert all(p.is_cuda for p in loaded.parameters())
        for model in (mine, loaded):
            assert torch.equal(model(input_ids=prompt.to("cuda")).logits.cpu(), expected)
        with mine.disable_adapter():
            assert torch.equal(mine(input_ids=prompt.to("cuda")).logits.cpu(), before)
        merged, other = mine.merge_and_unload(), other.merge_and_unload()
        assert_same_weights(merged, other)
        found = merged(input_ids=prompt.to("cuda")).logits.cpu()
        assert torch.equal(found, other(input_ids=prompt).logits)
        assert not torch.equal(expected, before) and torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("start", ["gaussian", "pissa", "olora"])
def test_lora_on_device_model_starts_with_its_weights(cuda, start):
    from peft import LoraConfig, get_peft_model

    base = ARCHITECTURES["llama"].build().to("cuda").eval()
    prompt = sequences(1)[0]["input_ids"][None].to("cuda")
    with torch.no_grad():
        before = base(input_ids=prompt).logits
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=start)
        model = get_peft_model(copy.deepcopy(base), config).eval()
        assert all(p.is_cuda for p in model.parameters())
        assert torch.allclose(model(input_ids=prompt).logits, before, atol=1e-5)


def test_trainer_trains_lora_in_mixed_precision(train):
    trainer = train(model=adapted(), bf16=True, learning_rate=2e-2, gradient_checkpointing=True)
    losses = history(trainer)
    assert losses[-1] < losses[0] and all(map(math.isfinite, losses))
    changed = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert changed and all("lora_" in name for name in changed)
