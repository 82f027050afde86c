"""Checkpoints of torch.distributed.checkpoint that one number of ranks saves and another number loads.

resharding.py save FOLDER     trains, and saves checkpoints
resharding.py load FOLDER     loads them, compares, and trains on

FSDP2, tensor parallelism, and both together. The tensors and Adam's state that were loaded are those that were saved, bit by bit.
Before and after, the weights are those of a training in one process without torch.distributed.
"""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_flatten_with_path

warnings.simplefilter("ignore")
does, folder = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("cpu:gloo,cuda:nccl")
rank, size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
#: Steps before the checkpoint, and steps behind it.
STEPS = 3


def network(seed):
    """Layers whose rows are not always a multiple of the ranks, so that some ranks have fewer rows."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 4))


def fsdp(model, mesh):
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model, mesh):
    last = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": last})


def both(model, mesh):
    return fsdp(tensor_parallel(model, mesh["tensors"]), mesh["data"])


line = init_device_mesh("cuda", (size,))
square = init_device_mesh("cuda", (max(size // 2, 1), min(size, 2)), mesh_dim_names=("data", "tensors"))
KINDS = {"FSDP2": (fsdp, line), "tensor parallel": (tensor_parallel, line), "both": (both, square)}


def training(model):
    """A model and its optimizer. One parameter has a group of its own."""
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.02, "weight_decay": 0.1}, {"params": others}]
    return model, torch.optim.Adam(groups, lr=0.01)


def train(model, optimizer, first, device):
    """All ranks have the same data, so the mean of their gradients has the bits of one gradient."""
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step)).to(device)
        model(x).square().mean().backward()
        optimizer.step()


def whole(value):
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def values(model, optimizer):
    """All leaves of the state of a model and its optimizer, whole and on the CPU. A collective."""
    leaves, _ = tree_flatten_with_path(get_state_dict(model, optimizer))
    return {path: whole(leaf) for path, leaf in leaves}


def compare(found, expected, same):
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        ours = found[path]
        fine = same(ours, value) if isinstance(value, torch.Tensor) else ours == value
        assert fine, (path, ours, value)


def close(ours, theirs):
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


alone = training(network(1))
train(*alone, 0, "cpu")
before = values(*alone)
train(*alone, STEPS, "cpu")
after = values(*alone)
for kind, (spread, mesh) in KINDS.items():
    checkpoint, saved = folder / kind, folder / f"{kind}.pt"
    if does == "save":
        model, optimizer = training(spread(network(1).to(local_rank), mesh))
        train(model, optimizer, 0, local_rank)
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=checkpoint)
        found = values(model, optimizer)
        if not rank:
            torch.save(found, saved)
        compare(found, before, close)
    else:
        model, optimizer = training(spread(network(2).to(local_rank), mesh))
        state, optimizer_state = get_state_dict(model, optimizer)
        loaded = {"model": state, "optimizer": optimizer_state}
        dcp.load(loaded, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        compare(values(model, optimizer), torch.load(saved, weights_only=False), torch.equal)
        train(model, optimizer, STEPS, local_rank)
        compare(values(model, optimizer), after, close)
    if not rank:
        print(kind, "agrees", flush=True)
dist.destroy_process_group()
