"""What programs do with torch.distributed beyond DDP and FSDP: each case prints a result that is the same on any device.

wrappers.py cuda|cpu     "cpu": the same program with gloo, as the reference
"""

import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather, all_reduce
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP

warnings.simplefilter("ignore")
kind, rank, size = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
if kind == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
mesh = init_device_mesh(kind, (size,))


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def weight(tensors):
    return round(sum([float(whole(t.detach()).double().sum()) for t in tensors]), 4)


def trained(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(random(rank, 6, 8)).square().mean().backward()
        optimizer.step()
    return weight(model.parameters())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def sharded_optimizer():
    model = DDP(network())
    return trained(model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01))


def own_communication_hook():
    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer().div_(size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model = DDP(network())
    model.register_comm_hook(None, hook)
    return trained(model, sgd(model))


def compressing_hook():
    model = DDP(network())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return round(trained(model, sgd(model)), 1)


def ranks_with_different_numbers_of_batches():
    model = DDP(network())
    with model.join():
        return trained(model, sgd(model), steps=2 + rank)


def accumulated_gradients_of_shards():
    model = network()
    fully_shard(model, mesh=mesh)
    optimizer = sgd(model)
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        model(random(rank, 6, 8)).square().mean().backward()
        if step % 2:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return weight(model.parameters()), round(float(whole(norm)), 4)


def compiled_shards():
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
        layer.compile()
    fully_shard(model, mesh=mesh)
    return trained(model, torch.optim.Adam(model.parameters(), lr=0.01))


def gradients_through_collectives():
    x, y = torch.ones(3, device=device, requires_grad=True), torch.ones(2, device=device, requires_grad=True)
    (all_reduce(x * (rank + 1)) * 2).sum().backward()
    torch.stack(all_gather(y * rank)).square().sum().backward()
    return x.grad.tolist(), y.grad.tolist()


def compiled_collective():
    everyone = list(range(size))
    compiled = torch.compile(lambda x: functional.all_reduce(x * 2, "sum", everyone) + 1)
    return compiled(torch.ones(4, device=device) * rank).tolist()


def objects():
    found, parts, one = [None] * size, [None] * size, [None]
    dist.all_gather_object(found, {"rank": rank})
    dist.gather_object(rank, parts if not rank else None)
    dist.scatter_object_list(one, [10 * k for k in range(size)] if not rank else None)
    return found, parts, one


def ring():
    x, y = torch.full((3,), float(rank), device=device), torch.empty(3, device=device)
    there, back = (rank + 1) % size, (rank - 1) % size
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, there), dist.P2POp(dist.irecv, y, back)]):
        work.wait()
    return y.tolist()


def stage(k):
    torch.manual_seed(k)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device)


def loss_of(found, wanted):
    return (found - wanted).square().mean()


def run_pipeline(schedule, losses):
    if rank == 0:
        schedule.step(random(10, 8, 8))
    elif rank == size - 1:
        schedule.step(target=random(11, 8, 8), losses=losses)
    else:
        schedule.step()


def pipelines():
    results = []
    for make in (ScheduleGPipe, Schedule1F1B):
        module, losses = stage(rank), []
        run_pipeline(make(PipelineStage(module, rank, size, device), n_microbatches=4, loss_fn=loss_of), losses)
        results.append((weight([module[0].weight.grad.abs()]), round(sum(map(float, losses)), 4)))
    return results


def interleaved_pipeline():
    modules = [stage(rank), stage(rank + size)]
    stages = [PipelineStage(m, rank + k * size, 2 * size, device) for k, m in enumerate(modules)]
    run_pipeline(ScheduleInterleaved1F1B(stages, n_microbatches=2 * size, loss_fn=loss_of), [])
    return [weight([m[0].weight.grad.abs()]) for m in modules]


def operations_of_sharded_tensors():
    table = torch.arange(24.0).reshape(6, 4).to(device)
    rows, columns = (
        distribute_tensor(table, mesh, [Shard(0)]),
        distribute_tensor(table.T.contiguous(), mesh, [Shard(1)]),
    )
    partial = DTensor.from_local(torch.ones(2, device=device), mesh, [Partial()])
    found = (
        rows @ columns,
        rows.softmax(-1),
        nn.functional.layer_norm(rows, (4,)),
        rows.sum(0),
        partial,
        rows.argmax(1),
    )
    return [round(float(t.full_tensor().double().abs().sum()), 3) for t in found]


def cross_entropy_of_sharded_logits():
    logits = distribute_tensor(random(1, 4, 8), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = nn.functional.cross_entropy(logits, torch.tensor([0, 3, 5, 7]).to(device))
        loss.backward()
    return weight([loss, logits.grad.abs()])


def sequence_parallel():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)).to(device)
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(),
    }
    result = parallelize_module(model, mesh, plan)(random(2, 2, 4, 8))
    result.square().mean().backward()
    return round(result.sum().item(), 3), round(weight([p.grad.abs() for p in model.parameters()]), 3)


CASES = [
    *(sharded_optimizer, own_communication_hook, compressing_hook, ranks_with_different_numbers_of_batches),
    *(accumulated_gradients_of_shards, compiled_shards, gradients_through_collectives, compiled_collective, objects),
    *(ring, pipelines, interleaved_pipeline, operations_of_sharded_tensors, cross_entropy_of_sharded_logits),
    sequence_parallel,
]
for case in CASES:
    print(case.__name__, case(), flush=True)
    dist.barrier()
dist.destroy_process_group()
