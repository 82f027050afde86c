"""Each collective on "cuda" tensors is compared with gloo on the same CPU tensors, and with the sum in the order of the ranks.
A group for both devices also takes CPU tensors; those results are compared with sums and lists that the script computes.

`collectives.py all` does so for more dtypes.
"""

import datetime
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

warnings.simplefilter("ignore")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64)
FURTHER = (torch.float64, torch.int32, torch.uint8, torch.int8)
SIZES = (1, 1000, 300_000)

dist.init_process_group("cpu:gloo,cuda:nccl", timeout=datetime.timedelta(seconds=250))
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
assert torch.cuda.device_count() == size and torch.cuda.current_device() == rank
assert dist.is_nccl_available()
generator = torch.Generator().manual_seed(rank)


def values(n, dtype=torch.float32):
    if dtype.is_floating_point:
        return torch.randn(n, generator=generator).to(dtype)
    return torch.randint(0, 4, (n,), generator=generator).to(dtype)


def everybodys(host):
    """The values of all ranks, in their order."""
    found = [torch.empty_like(host) for _ in range(size)]
    dist.all_gather([f.view(torch.uint8) for f in found], host.view(torch.uint8))
    return found


def check(name, ours, expected):
    assert ours.device == torch.device("cuda", rank), (name, ours.device)
    assert torch.equal(ours.cpu(), expected), (name, ours, expected)


def in_order(parts, op):
    total = parts[0].clone()
    for part in parts[1:]:
        total = op(total, part)
    return total


def reductions():
    ops = {
        dist.ReduceOp.SUM: torch.add,
        dist.ReduceOp.PRODUCT: torch.mul,
        dist.ReduceOp.MIN: torch.minimum,
        dist.ReduceOp.MAX: torch.maximum,
    }
    for dtype in (*DTYPES, *(FURTHER if "all" in sys.argv else ())):
        for n in SIZES if dtype is torch.float32 else SIZES[:2]:
            host = values(n, dtype)
            parts = everybodys(host)
            for op, step in ops.items():
                x = host.to(rank)
                dist.all_reduce(x, op)
                check(f"all_reduce {op} {dtype} {n}", x, in_order(parts, step))
                if size == 2:  # one addition: any order has the same bits
                    dist.all_reduce(gloo := host.clone(), op)
                    check(f"all_reduce {op} {dtype} {n} and gloo", x, gloo)
            x = host.to(rank)
            dist.all_reduce(x, dist.ReduceOp.AVG)
            total = in_order(parts, torch.add)
            average = total / size if dtype.is_floating_point else total.div(size, rounding_mode="trunc")
            check(f"average {dtype} {n}", x, average.to(dtype))
    host = values(100)
    x = host.to(rank)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.3))
    check("premul_sum", x, in_order([part * 0.3 for part in everybodys(host)], torch.add))
    x = host.to(rank)
    dist.reduce(x, size - 1)
    total = in_order(everybodys(host), torch.add)
    check("reduce", x, total if rank == size - 1 else host)
    x = (host > 0).to(rank)
    dist.all_reduce(x)
    check("all_reduce of bools", x, torch.stack(everybodys(host)).gt(0).any(0))
    x = torch.complex(host, host).to(rank)
    dist.all_reduce(x)
    total = in_order(everybodys(host), torch.add)
    check("all_reduce of complex numbers", x, torch.complex(total, total))
    images = values(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    x = images.to(rank)
    assert x.is_contiguous(memory_format=torch.channels_last)
    dist.all_reduce(x)
    check("all_reduce of channels-last images", x, in_order(everybodys(images.contiguous()), torch.add))


def movements():
    for dtype in (torch.float32, torch.bool, torch.complex64, torch.int16):
        host = values(6).to(dtype)
        parts = everybodys(host)
        x = host.to(rank)
        dist.broadcast(x, size - 1)
        check("broadcast", x, parts[-1])
        x = host.to(rank)
        out = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(out, x)
        for ours, part in zip(out, parts, strict=True):
            check("all_gather", ours, part)
        flat = torch.empty(6 * size, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(flat, x)
        check("all_gather_into_tensor", flat, torch.cat(parts))
        out = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
        dist.gather(x, out, 0)
        for ours, part in zip(out or [], parts, strict=False):
            check("gather", ours, part)
        y = torch.empty_like(x)
        dist.scatter(y, [x.clone(), *[x] * (size - 1)] if rank == 1 else None, 1)
        check("scatter", y, parts[1])
    spread = torch.zeros(size, 2, 3, device="cuda").transpose(1, 2)
    dist.all_gather([spread[k] for k in range(size)], torch.full((3, 2), rank + 1.0, device="cuda"))
    check("all_gather into tensors with gaps", spread, torch.stack([torch.full((3, 2), k + 1.0) for k in range(size)]))


def parts_of_all():
    host = values(4 * size)
    parts = everybodys(host)
    out = torch.empty(4, device="cuda")
    dist.reduce_scatter_tensor(out, host.to(rank))
    check("reduce_scatter_tensor", out, in_order(parts, torch.add)[4 * rank : 4 * rank + 4])
    dist.reduce_scatter(out, list(host.to(rank).split(4)), dist.ReduceOp.MAX)
    check("reduce_scatter", out, in_order(parts, torch.maximum)[4 * rank : 4 * rank + 4])
    out = torch.empty(4 * size, device="cuda")
    dist.all_to_all_single(out, host.to(rank))
    check("all_to_all_single", out, torch.cat([part[4 * rank : 4 * rank + 4] for part in parts]))
    gives, gets = [k + 1 for k in range(size)], [rank + 1] * size
    table = values(2 * sum(gives)).reshape(-1, 2)
    out, gloo = torch.empty(sum(gets), 2, device="cuda"), torch.empty(sum(gets), 2)
    dist.all_to_all_single(out, table.to(rank), gets, gives)
    dist.all_to_all_single(gloo, table, gets, gives)
    check("all_to_all_single of unequal parts", out, gloo)
    out = [torch.empty(rank + 1, 2, device="cuda") for _ in range(size)]
    dist.all_to_all(out, list(table.to(rank).split(gives)))
    check("all_to_all", torch.cat(out), gloo)


def between_two_ranks():
    right, left = (rank + 1) % size, (rank - 1) % size
    x, y = torch.full((3,), float(rank), device="cuda"), torch.empty(3, device="cuda")
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(y, 0)
        check("recv", y, torch.zeros(3))
    numbers = torch.empty(1, dtype=torch.int64, device="cuda")
    ops = [
        dist.P2POp(dist.isend, x, right),
        dist.P2POp(dist.irecv, y, left),
        dist.P2POp(dist.isend, torch.tensor([rank], device="cuda"), right),
        dist.P2POp(dist.irecv, numbers, left),
    ]
    for handle in dist.batch_isend_irecv(ops if rank else ops[::2] + ops[1::2]):
        handle.wait()
    check("batch_isend_irecv", y, torch.full((3,), float(left)))
    check("batch_isend_irecv of numbers", numbers, torch.tensor([left]))


def objects_and_groups():
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": k} for k in range(size)]
    told = [f"from {rank}"]
    dist.broadcast_object_list(told, 1)
    assert told == ["from 1"]
    work = dist.all_reduce(x := torch.ones(3, device="cuda"), async_op=True)
    work.wait()
    check("asynchronous all_reduce", x, torch.full((3,), float(size)))
    dist.barrier()
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x := torch.ones(1, device="cuda"), group=group)
        check("all_reduce of a subgroup", x, torch.tensor([2.0]))
        dist.destroy_process_group(group)
    with dist._coalescing_manager(device=torch.device("cuda")):
        for x in (tensors := [torch.ones(2, device="cuda"), torch.ones(3, device="cuda")]):
            dist.all_reduce(x)
    check("coalesced all_reduce", torch.cat(tensors), torch.full((5,), float(size)))
    x = torch.full((2,), rank + 1.0, device="cuda")
    total = float(sum(range(1, size + 1)))
    check("functional all_reduce", functional.all_reduce(x, "sum", dist.group.WORLD) + 0, torch.full((2,), total))
    gathered = functional.all_gather_tensor(x, 0, dist.group.WORLD) + 0
    check("functional all_gather", gathered, torch.arange(1.0, size + 1).repeat_interleave(2))
    scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD) + 0
    check("functional reduce_scatter", scattered, torch.full((2,), (rank + 1.0) * size))
    swapped = functional.all_to_all_single(gathered, None, None, dist.group.WORLD) + 0
    check("functional all_to_all", swapped, torch.full((2 * size,), rank + 1.0))
    summed = functional.all_reduce_coalesced([x, x + 1], "sum", dist.group.WORLD)
    check("functional coalesced", summed[1] + 0, torch.full((2,), total + size))


def refused():
    cases = (
        (
            lambda: dist.all_reduce(torch.ones(2, device="cuda"), dist.ReduceOp.BAND),
            ValueError,
            "Cannot use ReduceOp.BAND",
        ),
        (lambda: dist.all_reduce(torch.ones(4, 4, device="cuda").t()), ValueError, "contiguous"),
        (lambda: dist.all_reduce(torch.ones(2, device="cuda").short()), ValueError, "not supported for NCCL"),
        (lambda: dist.split_group(None, [[0, 1]]), NotImplementedError, "new_group"),
        (
            lambda: dist.all_gather_into_tensor(torch.ones(3, device="cuda"), torch.ones(2, device="cuda")),
            ValueError,
            "world_size times",
        ),
        (lambda: dist.recv(torch.ones(1, device="cuda")), ValueError, "name the rank"),
    )
    for call, kind, text in cases:
        try:
            call()
        except kind as e:
            assert text in str(e), e
        else:
            raise AssertionError(text)


def on_the_cpu():
    """CPU tensors in a group that has both: rank 0 gets its results only when the last rank has come."""

    def late(call):
        if rank == size - 1:
            time.sleep(0.2)
        return call()

    group, x = dist.group.WORLD, torch.full((2,), rank + 1.0)
    total, everything = float(sum(range(1, size + 1))), torch.arange(1.0, size + 1).repeat_interleave(2)
    found = late(lambda: functional.all_gather_tensor(x, 0, group) + 0)
    assert torch.equal(found, everything), ("functional all_gather on the CPU", found)
    found = late(lambda: functional.reduce_scatter_tensor(everything, "sum", 0, group) + 0)
    assert torch.equal(found, (x * size)), ("functional reduce_scatter on the CPU", found)
    found = late(lambda: functional.all_reduce_coalesced([x, torch.ones(3)], "sum", group))
    assert torch.equal(found[0] + 0, torch.full((2,), total)), found
    assert torch.equal(found[1] + 0, torch.full((3,), float(size))), found
    found = late(lambda: functional.all_gather_into_tensor_coalesced([x, x + 1], group))
    assert torch.equal(found[0] + 0, everything) and torch.equal(found[1] + 0, everything + 1), found
    found = late(lambda: functional.reduce_scatter_tensor_coalesced([everything, everything + 1], "sum", [0, 0], group))
    assert torch.equal(found[0] + 0, x * size) and torch.equal(found[1] + 0, (x + 1) * size), found
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    late(lambda: dist.all_gather_coalesced(lists, [x, torch.full((3,), float(rank))]))
    assert all(torch.equal(two, torch.full((2,), k + 1.0)) for k, (two, _) in enumerate(lists)), lists
    assert all(torch.equal(three, torch.full((3,), float(k))) for k, (_, three) in enumerate(lists)), lists
    if rank == 1:
        dist.send(x, 0)
    elif rank == 0:
        assert dist.recv(found := torch.zeros(2)) == 1 and torch.equal(found, torch.full((2,), 2.0)), found


for part in (reductions, movements, parts_of_all, between_two_ranks, objects_and_groups, on_the_cpu, refused):
    part()
dist.barrier()
pure = dist.new_group(backend="nccl")
assert dist.get_backend(pure) == "nccl"
try:
    dist.all_reduce(torch.ones(1), group=pure)
except RuntimeError as e:
    assert "No backend type associated with device type cpu" in str(e), e
else:
    raise AssertionError("a CPU tensor was accepted")
dist.destroy_process_group()
print("all collectives agree")
