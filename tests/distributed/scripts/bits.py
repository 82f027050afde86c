"""Prints a digest of the weights of trainings with DDP and FSDP2, so that two runs can be compared bit for bit."""

import hashlib
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

warnings.simplefilter("ignore")
dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(local_rank)


def digest_of(name, model, whole):
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(6, 8, generator=generator).to(local_rank)).square().mean().backward()
        optimizer.step()
    found = hashlib.sha256()
    for p in model.parameters():
        found.update(whole(p.detach()).cpu().numpy().tobytes())
    print(name, found.hexdigest(), flush=True)


digest_of("DDP", DDP(network(), device_ids=[local_rank]), lambda p: p)
model = network()
fully_shard(model)
digest_of("FSDP2", model, lambda p: p.full_tensor())
dist.destroy_process_group()
