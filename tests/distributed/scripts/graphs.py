"""Collectives in captured CUDA graphs: replays have the bits of the same work without a graph: python graphs.py"""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
half = dist.new_group(list(range(size)))


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * rank + seed)).cuda()


def every_collective(x):
    """Each collective that a graph may contain, with work before, between and behind. Returns all results."""
    n = x.numel()
    found = [x * 2]
    y = torch.tanh(x)
    dist.all_reduce(y)
    z = y * 0.5 + 1
    dist.all_reduce(z, op=dist.ReduceOp.AVG, group=half)  # right behind: no program between
    dist.all_reduce(z, op=dist.ReduceOp.MAX)
    found += [y, z.sin()]
    gathered = torch.empty(size * n, device="cuda")
    dist.all_gather_into_tensor(gathered, found[-1] + x)
    partial = torch.zeros(
        size * n + 5, device="cuda"
    )  # its last elements are read, and only a replay's zeros are there
    dist.all_gather_into_tensor(partial[: size * n], x)
    partial += 1
    scattered = torch.empty(n, device="cuda")
    dist.reduce_scatter_tensor(scattered, gathered * gathered)
    found += [gathered, partial, scattered]
    shared = torch.where(x > 0, x, -x)
    dist.broadcast(shared, 1)
    exchanged = torch.empty(2 * size, device="cuda")
    dist.all_to_all_single(exchanged, gathered[: 2 * size].contiguous())
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, shared)
    summed = x.double()
    work = dist.all_reduce(summed, async_op=True)
    other = x.exp()
    work.wait()
    taken = torch.empty_like(x)
    for each in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, other, (rank + 1) % size), dist.P2POp(dist.irecv, taken, (rank - 1) % size)]
    ):
        each.wait()
    noisy = nn.functional.dropout(taken, 0.5)
    dist.reduce(noisy, 0)
    return [*found, shared, exchanged, *parts, summed, other, taken, noisy]


def capture(function, *inputs, pool=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        results = function(*inputs)
    return graph, results


x = torch.zeros(7, device="cuda")
every_collective(x)
graph, results = capture(every_collective, x)
assert not any(t.any().item() for t in results)  # nothing has run
for seed in range(4):
    x.copy_(numbers(seed, 7))
    state = torch.cuda.get_rng_state()
    graph.replay()
    torch.cuda.set_rng_state(state)
    expected = every_collective(x)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)), seed

# a graph in a graph, and eager collectives between replays
outer, copies = capture(lambda: (graph.replay(), [t + 1 for t in results])[1])
for seed in range(3):
    x.copy_(numbers(10 + seed, 7))
    dist.all_reduce(torch.ones(3, device="cuda"))
    outer.replay()
    assert all(torch.equal(a + 1, b) for a, b in zip(results, copies, strict=True))


def chain(x, weight):
    """Layers whose values nobody keeps, as tensor parallel has them: their buffers are used again."""
    for _ in range(12):
        x = torch.tanh(x @ weight)
        dist.all_reduce(x)
    return x


values, weight = torch.zeros(16, 64, device="cuda"), numbers(9, 64, 64) / 8
chain(values, weight)
torch.cuda.synchronize()
before = torch.cuda.memory_allocated()
deep, result = capture(chain, values, weight)
kept = torch.cuda.memory_allocated() - before
assert kept <= 4 * values.nbytes, kept
for seed in range(3):
    values.copy_(numbers(40 + seed, 16, 64))
    deep.replay()
    assert torch.equal(result, chain(values, weight))

pool, sizes, before = torch.cuda.graph_pool_handle(), (16, 9, 4, 12), torch.cuda.memory_allocated()
inputs = [torch.zeros(n, 64, device="cuda") for n in sizes]
pooled = [capture(chain, t, weight, pool=pool) for t in inputs]
own = sum([t.nbytes for t in inputs]) + sum([t.nbytes for _, t in pooled])
assert torch.cuda.memory_allocated() - before - own <= 4 * values.nbytes  # as the largest graph alone


def around():
    """A value that is needed before and behind a graph of the same pool, but not outside."""
    hidden = torch.tanh(inputs[0])
    pooled[0][0].replay()
    return hidden + pooled[0][1]


outside, both = capture(around, pool=pool)
for seed in range(3):
    for t, (graph_of, result) in zip(inputs, pooled, strict=True):
        t.copy_(numbers(50 + seed, *t.shape))
        graph_of.replay()
        assert torch.equal(result, chain(t, weight))
    outside.replay()
    assert torch.equal(both, torch.tanh(inputs[0]) + chain(inputs[0], weight))

deep.enable_debug_mode()
with tempfile.NamedTemporaryFile("r") as file:
    deep.debug_dump(file.name)
    text = file.read()
assert text.count("torch.distributed all_reduce") == 12 and "graphs.py" in text


def training(graphed):
    """Parameters after some steps of DDP whose whole step is one graph, as PyTorch's notes on CUDA graphs show."""
    torch.manual_seed(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        model = DDP(
            nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)).cuda(), device_ids=[rank], bucket_cap_mb=1e-3
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)
    x, y = torch.zeros(4, 6, device="cuda"), torch.zeros(4, 3, device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(11):
        step()
    run, loss = capture(step) if graphed else (None, None)
    losses = []
    for seed in range(5):
        x.copy_(numbers(20 + seed, 4, 6))
        y.copy_(numbers(30 + seed, 4, 3))
        if run is None:
            loss = step()
        else:
            run.replay()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in model.parameters()]


(losses, weights), (plain_losses, plain_weights) = training(True), training(False)
assert losses == plain_losses, (losses, plain_losses)
assert all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True))


def refused(function, *parts):
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    except RuntimeError as e:
        text = f"{e} {e.__context__}"
        assert all(part in text for part in ("previous error during capture", *parts)), text
    else:
        raise AssertionError(function)


refused(lambda: dist.barrier(), "barrier waits for the other ranks")
refused(lambda: dist.all_gather_object([None] * size, rank), "collectives of objects")
refused(lambda: dist.new_group(list(range(size))), "cannot be made", "before the capture")
refused(lambda: dist.destroy_process_group(half), "destroy_process_group waits")
ones = torch.ones(3, device="cuda")
dist.all_reduce(ones)
assert ones.tolist() == [float(size)] * 3  # the session is whole

other = dist.new_group(list(range(size)))
lost, _ = capture(lambda: dist.all_reduce(ones, group=other))
dist.destroy_process_group(other)
try:
    lost.replay()
except RuntimeError as e:
    assert "its process group was destroyed" in str(e), e
else:
    raise AssertionError("a graph was replayed in a group that does not exist")
graph.replay()
torch.cuda.synchronize()
dist.destroy_process_group()
print("all graphs agree", flush=True)
sys.stdout.flush()
