"""Collectives of 24 MiB over executors that give 8 MiB of host memory to a collective."""

import torch
import torch.distributed as dist

N = 6 << 20
dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
mine = torch.arange(N, device="cuda", dtype=torch.float32) * (rank + 1)
base = torch.arange(N, device="cuda", dtype=torch.float32)
total = sum([base * (k + 1) for k in range(size)])


def check(name, found, expected):
    assert torch.equal(found, expected), (
        name
    )  # on the device: a large answer would need more host memory than is allowed here


found = mine.clone()
dist.all_reduce(found)
check("all_reduce", found, total)
found = mine.clone()
dist.reduce(found, 1)
check("reduce", found, total if rank == 1 else base)
found = mine.clone()
dist.broadcast(found, 1)
check("broadcast", found, base * 2)
found = torch.empty(size * N, device="cuda")
dist.all_gather_into_tensor(found, mine)
check("all_gather", found, torch.cat([base * (k + 1) for k in range(size)]))
part = torch.empty(N // size, device="cuda")
dist.reduce_scatter_tensor(part, mine)
check("reduce_scatter", part, total.chunk(size)[rank])
found = torch.empty_like(mine)
dist.all_to_all_single(found, mine)
check("all_to_all", found, torch.cat([base.chunk(size)[rank] * (k + 1) for k in range(size)]))
gives = [N // 8 if k < size - 1 else N - N // 8 * (size - 1) for k in range(size)]  # the last rank gets much more
gets = [gives[rank]] * size
found = torch.empty(sum(gets), device="cuda")
dist.all_to_all_single(found, mine, gets, gives)
check("uneven all_to_all", found, torch.cat([base.split(gives)[rank] * (k + 1) for k in range(size)]))
parts = [torch.empty_like(mine) for _ in range(size)] if rank == 1 else None
dist.gather(mine, parts, dst=1)
for k, part in enumerate(parts or ()):
    check("gather", part, base * (k + 1))
found = torch.empty_like(mine)
dist.scatter(found, [base * (k + 3) for k in range(size)] if rank == 1 else None, src=1)
check("scatter", found, base * (rank + 3))
found = torch.empty_like(mine)
if rank == 0:
    dist.send(mine, 1)
elif rank == 1:
    dist.recv(found, 0)
    check("recv", found, base)
small = [torch.full((k + 1,), float(rank), device="cuda") for k in range(3)]
taken = [torch.empty_like(t) for t in small]
before, behind = (rank - 1) % size, (rank + 1) % size
sends = [dist.P2POp(dist.isend, t, behind) for t in (small[0], mine, small[1], small[2])]
receives = [dist.P2POp(dist.irecv, t, before) for t in (taken[0], found, taken[1], taken[2])]
for each in dist.batch_isend_irecv([*sends, *receives]):
    each.wait()
check("exchange", found, base * (before + 1))
assert all(torch.equal(t, torch.full_like(t, float(before))) for t in taken)
print("all rounds agree")
