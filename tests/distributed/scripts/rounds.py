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
try:
    dist.all_to_all_single(torch.empty_like(mine), mine)
    torch.cuda.synchronize()
except RuntimeError as e:
    assert "WOOLY_EXECUTOR_SESSION_HOST" in str(e), e
    print("all rounds agree")
