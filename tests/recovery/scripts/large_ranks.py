"""Ranks whose collectives need more host memory than an executor gives one, if the ranks are on several executors.

large_ranks.py STEPS     rank 0 loses its executor at the steps in LOSE
"""

import hashlib
import os
import sys

import losing
import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
torch.cuda.set_device(local_rank)
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.arange(8 << 20, device="cuda", dtype=torch.float32) * (rank + 1) / (1 << 20)  # 32 MiB
said = hashlib.sha256()
for step in range(int(sys.argv[1])):
    if rank == 0:
        losing.step(step)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x * (rank + 1))
    x = y * 0.5 + step
    said.update(repr(x.sum().item()).encode())
os.write(1, f"rank {rank}: {said.hexdigest()}\n".encode())  # at once, because the ranks share the output
dist.destroy_process_group()
