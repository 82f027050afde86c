"""The Trainer of transformers uses nn.DataParallel on a session with two devices. Its weights agree with a CPU training."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        tokens = torch.randint(0, 100, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def trained(folder, batch, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    told = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
    training = {"max_steps": 6, "learning_rate": 1e-2, "optim": "sgd", "lr_scheduler_type": "constant"}
    arguments = TrainingArguments(folder, per_device_train_batch_size=batch, **training, **told, **options)
    trainer = Trainer(model, arguments, train_dataset=Tokens())
    trainer.train()
    return trainer, {name: p.detach().cpu() for name, p in model.named_parameters()}


def main(folder):
    trainer, ours = trained(folder, 4)
    assert trainer.args.n_gpu == 2 and type(trainer.model_wrapped) is torch.nn.DataParallel
    _, expected = trained(folder, 8, use_cpu=True)
    for name, parameter in expected.items():
        torch.testing.assert_close(ours[name], parameter, msg=lambda text, name=name: f"{name}: {text}")
    print(f"{len(ours)} parameters agree on {torch.cuda.device_count()} devices")


main(sys.argv[1])
