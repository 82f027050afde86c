"""Saves sharded models and loads them again: torch.distributed.checkpoint with FSDP2, and FSDP's state dicts.

checkpoints.py FOLDER
"""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard

warnings.simplefilter("ignore")
folder = Path(sys.argv[1])
dist.init_process_group("cpu:gloo,cuda:nccl")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4)).to(local_rank)


def sharded(seed):
    model = fully_shard(network(seed))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(5, 8, device=local_rank) * (rank + 1)).square().mean().backward()
    optimizer.step()


def whole(model):
    return {name: p.full_tensor().detach().cpu() for name, p in model.named_parameters()}


def equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


model, optimizer = sharded(1)
step(model, optimizer)
state, optimizer_state = get_state_dict(model, optimizer)
dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder / "dcp")
before = whole(model)
other, other_optimizer = sharded(2)
step(other, other_optimizer)
state, optimizer_state = get_state_dict(other, other_optimizer)
loaded = {"model": state, "optimizer": optimizer_state}
dcp.load(loaded, checkpoint_id=folder / "dcp")
set_state_dict(other, other_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
equal(whole(other), before)
for each in ((model, optimizer), (other, other_optimizer)):
    step(*each)  # the optimizers have the same moments, too
equal(whole(other), whole(model))
if not rank:
    print("torch.distributed.checkpoint agrees", flush=True)

full, _ = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
expected = whole(model)
if not rank:
    equal(full, expected)
    print("full state dict agrees", flush=True)

wrapped = FullyShardedDataParallel(network(3), device_id=local_rank, use_orig_params=True)
wrapped_optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
step(wrapped, wrapped_optimizer)
config = FullStateDictConfig(offload_to_cpu=True, rank0_only=False)
with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT, config):
    saved = {name: value.clone() for name, value in wrapped.state_dict().items()}
again = FullyShardedDataParallel(network(4), device_id=local_rank, use_orig_params=True)
with FullyShardedDataParallel.state_dict_type(again, StateDictType.FULL_STATE_DICT, config):
    again.load_state_dict(saved)
    equal({name: value.clone() for name, value in again.state_dict().items()}, saved)
if not rank:
    print("FSDP's state dict agrees", flush=True)
dist.destroy_process_group()
