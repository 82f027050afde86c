"""Prints more than a pipe holds in the last rank, before the first one may end."""

import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == dist.get_world_size() - 1:
    print("x" * (1 << 20))
dist.barrier()
print("all were there")
