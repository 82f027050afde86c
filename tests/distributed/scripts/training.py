"""Trainings of several ranks, as tutorials write them, have the weights of a training in one process on the CPU.

`training.py all` also tries wrappers and options that fewer programs use.
"""

import copy
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

warnings.simplefilter("ignore")
dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
rank, size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
STEPS, BATCH = 4, 6


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(of):
    generator = torch.Generator().manual_seed(of)
    return [torch.randn(BATCH, 8, generator=generator) for _ in range(STEPS)]


def trained(model, optimizer, losses):
    for step in range(STEPS):
        optimizer.zero_grad()
        losses(step).backward()
        optimizer.step()
    return model


def reference():
    """One process computes the mean of all ranks' losses."""
    model = network()
    data = [batches(of) for of in range(size)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return trained(
        model,
        optimizer,
        lambda step: sum([model(each[step]).square().mean() / size for each in data], start=torch.zeros(())),
    )


def agree(name, found, expected):
    for (key, ours), theirs in zip(found, expected.parameters(), strict=True):
        assert torch.allclose(ours.cpu(), theirs.detach(), rtol=1e-4, atol=1e-6), (name, key, ours, theirs)
    if rank == 0:
        print(name, "agrees", flush=True)


def further_wrappers():
    model = DDP(network().cuda(), find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with model.no_sync():  # gradients that nobody waits for
        model(data[0].cuda()).sum().backward()
    trained(model, optimizer, lambda step: model(data[step].cuda()).square().mean())
    agree("DDP with options", model.module.named_parameters(), expected)

    model = network().to(local_rank)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    loss = model(data[0].to(local_rank)).float().square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.full_tensor().isfinite().all().item() for p in model.parameters())
    if rank == 0:
        print("FSDP2 with mixed precision runs", flush=True)

    model = FullyShardedDataParallel(network().to(local_rank), device_id=local_rank, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained(model, optimizer, lambda step: model(data[step].to(local_rank)).square().mean())
    with FullyShardedDataParallel.summon_full_params(model):
        agree("FSDP", [(name, p.detach()) for name, p in model.named_parameters()], expected)

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))
    images = torch.randn(2 * size, 2, 4, 4, generator=torch.Generator().manual_seed(3))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(layers)).to(local_rank)
    ours = DDP(model, device_ids=[local_rank])(images[2 * rank : 2 * rank + 2].to(local_rank))
    assert torch.allclose(ours.detach().cpu(), layers(images).detach()[2 * rank : 2 * rank + 2], atol=1e-5)


expected = reference()

model = DDP(network().to(local_rank), device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = batches(rank)
trained(model, optimizer, lambda step: model(data[step].to(local_rank)).square().mean())
agree("DDP", model.module.named_parameters(), expected)

model = DDP(network().to(local_rank), device_ids=[local_rank], static_graph=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
trained(model, optimizer, lambda step: model(data[step].to(local_rank)).square().mean())
agree("DDP with a static graph", model.module.named_parameters(), expected)

model = network().to(local_rank)
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
trained(model, optimizer, lambda step: model(data[step].to(local_rank)).square().mean())
agree("FSDP2", [(name, p.full_tensor().detach()) for name, p in model.named_parameters()], expected)

mesh = init_device_mesh("cuda", (size,))
whole = network()
sharded = parallelize_module(
    copy.deepcopy(whole).to(local_rank), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
)
x = batches(0)[0]
ours, theirs = sharded(x.to(local_rank)), whole(x)
assert torch.allclose(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-6)
ours.square().mean().backward()
theirs.square().mean().backward()
grads = [
    (n, g.full_tensor() if hasattr(g, "full_tensor") else g)
    for n, g in [(n, p.grad) for n, p in sharded.named_parameters()]
]
for (name, grad), p in zip(grads, whole.parameters(), strict=True):
    assert torch.allclose(grad.cpu(), p.grad, rtol=1e-4, atol=1e-6), name
table = torch.arange(8.0 * size).reshape(-1, 4)
rows = distribute_tensor(table.to(local_rank), mesh, [Shard(0)])
assert torch.equal(rows.full_tensor().cpu(), table)
assert torch.equal(rows.redistribute(mesh, [Replicate()]).to_local().cpu(), table)
assert torch.equal((rows * 2).sum().full_tensor().cpu(), 2 * table.sum())
if rank == 0:
    print("tensor parallel agrees", flush=True)

generator = torch.Generator().manual_seed(4)
heads = [torch.randn(2, 2 * size, 5, 8, generator=generator) for _ in range(3)]
ours = [distribute_tensor(t.to(local_rank), mesh, [Shard(1)]).detach().requires_grad_() for t in heads]
theirs = [t.clone().requires_grad_() for t in heads]
results = [nn.functional.scaled_dot_product_attention(*tensors, is_causal=True) for tensors in (ours, theirs)]
for result in results:
    result.square().sum().backward()
assert torch.allclose(results[0].full_tensor().cpu(), results[1], atol=1e-5)
for mine, other in zip(ours, theirs, strict=True):
    assert torch.allclose(mine.grad.full_tensor().cpu(), other.grad, atol=1e-5)
if rank == 0:
    print("attention agrees", flush=True)
if "all" in sys.argv:
    further_wrappers()
dist.destroy_process_group()
