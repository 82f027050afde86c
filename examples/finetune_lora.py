"""Teaches a small language model to count with LoRA: Transformers and PEFT as they come, on "cuda", without a network."""

import argparse
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

NUMBERS = 64
LENGTH = 16


def counting(count, seed):
    """Sequences that count up from somewhere, modulo `NUMBERS`."""
    starts = torch.randint(NUMBERS, (count, 1), generator=torch.Generator().manual_seed(seed))
    rows = (starts + torch.arange(LENGTH)) % NUMBERS
    return [{"input_ids": row, "labels": row} for row in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    print(f"training on {torch.cuda.get_device_name()}")
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(
            vocab_size=NUMBERS,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        LlamaForCausalLM(config).save_pretrained(f"{folder}/base")

        base = AutoModelForCausalLM.from_pretrained(f"{folder}/base", device_map="cuda")
        lora = LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM"
        )
        model = get_peft_model(base, lora)
        model.print_trainable_parameters()
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=f"{folder}/runs",
                max_steps=args.steps,
                per_device_train_batch_size=16,
                learning_rate=1e-2,
                bf16=args.precision == "bf16",
                fp16=args.precision == "fp16",
                logging_steps=10,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                seed=args.seed,
            ),
            train_dataset=counting(512, seed=1),
        )
        trainer.train()
        model.save_pretrained(f"{folder}/adapter")

        base = AutoModelForCausalLM.from_pretrained(f"{folder}/base", device_map="cuda")
        merged = PeftModel.from_pretrained(base, f"{folder}/adapter").merge_and_unload().eval()
        prompt = torch.tensor([[7, 8, 9, 10], [60, 61, 62, 63]], device="cuda")
        words = merged.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
        for row in words.tolist():
            print("counts", *row)
        right = (prompt[:, :1] + torch.arange(12, device="cuda")) % NUMBERS
        print(f"right: {(words == right)[:, 4:].float().mean().item():.0%}")


if __name__ == "__main__":
    main()
