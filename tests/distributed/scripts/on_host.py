"""Collectives of the backend "gloo" on "cuda" tensors are compared with the same ones on CPU tensors."""

import warnings

import torch
import torch.distributed as dist
from torch import nn

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(rank)
left, right = (rank - 1) % size, (rank + 1) % size


def all_gather(x):
    found = [torch.zeros_like(x) for _ in range(size)]
    dist.all_gather(found, x)
    return found


def all_gather_into_tensor(x):
    found = x.new_zeros(size * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(found, x)
    return [found]


def all_reduce(x):
    found = [x.clone(), x.clone()]
    dist.all_reduce(found[0], dist.ReduceOp.MAX)
    dist.all_reduce(found[1], async_op=True).wait()
    return found


def all_reduce_transposed(x):
    found = x.clone().t()
    dist.all_reduce(found)
    return [found]


def broadcast(x):
    found = x.clone()
    dist.broadcast(found, size - 1)
    return [found]


def reduce(x):
    found = x.clone()
    dist.reduce(found, 0)
    return [found] if not rank else []


def gather(x):
    found = [torch.zeros_like(x) for _ in range(size)] if not rank else None
    dist.gather(x, found)
    return found or []


def scatter(x):
    found = torch.zeros_like(x)
    dist.scatter(found, [x + k for k in range(size)] if not rank else None)
    return [found]


def reduce_scatter(x):
    found = torch.zeros_like(x)
    dist.reduce_scatter_tensor(found, torch.cat([x + k for k in range(size)]))
    return [found]


def all_to_all(x):
    found = torch.zeros_like(x)
    dist.all_to_all_single(found, x)
    return [found]


def exchange(x):
    """Each rank begins to receive, and sends afterwards."""
    found = torch.zeros_like(x)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, found, left), dist.P2POp(dist.isend, x, right)]):
        work.wait()
    return [found]


def pass_on(x):
    found = torch.zeros_like(x)
    if rank:
        dist.send(x, rank - 1)
    if rank < size - 1:
        assert dist.recv(found) == rank + 1
    return [found]


def train(x):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3).to(x.device))
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


host = torch.randn(2 * size, 4, generator=generator)
for call in (
    *(all_gather, all_gather_into_tensor, all_reduce, all_reduce_transposed, broadcast, reduce, gather, scatter),
    *(reduce_scatter, all_to_all, exchange, pass_on, train),
):
    ours, theirs = call(host.cuda()), call(host.clone())
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.is_cuda, call.__name__
        assert torch.equal(mine.cpu(), expected), (call.__name__, mine, expected)


def refused(x):
    try:
        dist.all_reduce(x, dist.ReduceOp.BXOR)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


assert refused(host.cuda()) == refused(host.clone()) != "", (refused(host.cuda()), refused(host.clone()))
dist.barrier()
dist.destroy_process_group()
print("gloo agrees")
