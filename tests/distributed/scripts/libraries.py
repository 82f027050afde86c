"""Accelerate and the Trainer of transformers with several ranks: all ranks have equal weights, and the loss goes down.

libraries.py FOLDER
"""

import os
import sys
import warnings

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

warnings.simplefilter("ignore")
local_rank = int(os.environ["LOCAL_RANK"])


def same_everywhere(model):
    """All ranks have the weights of rank 0, bit for bit."""
    for p in model.parameters():
        ours = p.detach().clone()
        dist.broadcast(ours, 0)
        assert torch.equal(ours, p.detach())


accelerator = Accelerator()
assert accelerator.num_processes == dist.get_world_size() and accelerator.device.type == "cuda"
torch.manual_seed(0)
inputs = torch.randn(64, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(5):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
assert sum(losses[-len(loader) :]) < sum(losses[: len(loader)]), losses
same_everywhere(model)
found = accelerator.gather_for_metrics(torch.full((2,), float(accelerator.process_index), device=accelerator.device))
assert found.tolist() == [float(rank) for rank in range(accelerator.num_processes) for _ in range(2)]
accelerator.save_state(sys.argv[1])
accelerator.wait_for_everyone()
accelerator.load_state(sys.argv[1])
same_everywhere(model)
if accelerator.is_main_process:
    print("Accelerate agrees", flush=True)


class Sentences(Dataset):
    """Sentences whose class is whether their first word is below 16."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randint(0, 32, (64, 6), generator=generator)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index]
        return {"input_ids": words, "labels": int(words[0] < 16)}


torch.manual_seed(0)
config = BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=2
)
arguments = TrainingArguments(
    output_dir=sys.argv[1] + "/trainer",
    per_device_train_batch_size=4,
    num_train_epochs=2,
    learning_rate=0.01,
    report_to=[],
    disable_tqdm=True,
    save_strategy="epoch",
    logging_strategy="epoch",
    seed=0,
)
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=Sentences(), eval_dataset=Sentences())
trainer.train()
logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
assert logged[-1] < logged[0], logged
same_everywhere(trainer.model)
here = BertForSequenceClassification(config).eval()
here.load_state_dict({name: value.cpu() for name, value in trainer.model.state_dict().items()})
with torch.no_grad():
    expected = here(input_ids=Sentences().words).logits
found = torch.from_numpy(trainer.predict(Sentences()).predictions)  # gathered from all ranks
assert torch.allclose(found, expected, atol=1e-5)
if trainer.is_world_process_zero():
    print("Trainer agrees", flush=True)
dist.destroy_process_group()
