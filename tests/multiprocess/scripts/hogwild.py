"""Hogwild: processes train one model on "cuda" without locks, and count with a lock. Also a pool and queues."""

import copy

import torch
import torch.multiprocessing as mp
from torch import nn

N_PROCESSES, N_STEPS = 2, 40


def data(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 4, generator=generator)
    return x, (x @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])) + 1


def train(rank, model, mine, counter, lock):
    """`mine` is trained by this process alone, `model` by all."""
    x, y = [t.cuda() for t in data(rank)]
    for m in (model, mine[rank]):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.02)
        for _ in range(N_STEPS):
            optimizer.zero_grad()
            nn.functional.mse_loss(m(x), y).backward()
            optimizer.step()
    for _ in range(20):
        with lock:
            counter += 1


def double(t):
    return t * 2


def produce(queue, done):
    kept = []
    for k in range(5):
        kept.append(torch.full((k + 1,), float(k), device="cuda"))
        queue.put(kept[-1])
    done.wait()  # as CUDA requires, until the tensors were received


def main():
    torch.manual_seed(0)
    alone = [nn.Linear(4, 1) for _ in range(N_PROCESSES)]
    model = nn.Linear(4, 1).cuda()
    model.share_memory()
    mine, counter = [copy.deepcopy(m).cuda() for m in alone], torch.zeros((), dtype=torch.int64, device="cuda")
    context = mp.get_context("spawn")
    mp.spawn(train, args=(model, mine, counter, context.Lock()), nprocs=N_PROCESSES)
    for rank, (here, there) in enumerate(zip(alone, mine, strict=True)):
        x, y = data(rank)
        optimizer = torch.optim.SGD(here.parameters(), lr=0.02)
        for _ in range(N_STEPS):
            optimizer.zero_grad()
            nn.functional.mse_loss(here(x), y).backward()
            optimizer.step()
        assert all(
            torch.allclose(a, b.cpu(), atol=1e-6) for a, b in zip(here.parameters(), there.parameters(), strict=True)
        )
    assert counter.item() == 20 * N_PROCESSES, counter
    losses = [nn.functional.mse_loss(model(x.cuda()), y.cuda()).item() for x, y in map(data, range(N_PROCESSES))]
    first = [y.square().mean().item() for _, y in map(data, range(N_PROCESSES))]
    assert all(loss < before / 4 for loss, before in zip(losses, first, strict=True)), (losses, first)
    print("hogwild agrees")

    tensors = [torch.arange(3.0, device="cuda") + k for k in range(4)]
    with context.Pool(1) as pool:
        for sent, got in zip(tensors, pool.map(double, tensors), strict=True):
            assert got.is_cuda and torch.equal(got.cpu(), 2 * sent.cpu())
    print("pool agrees")

    queue, done = context.Queue(), context.Event()
    process = context.Process(target=produce, args=(queue, done))
    process.start()
    for k in range(5):
        assert queue.get(timeout=200).cpu().tolist() == [float(k)] * (k + 1)
    done.set()
    process.join(200)
    assert process.exitcode == 0
    print("queue agrees")


if __name__ == "__main__":
    main()
