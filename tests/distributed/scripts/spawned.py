"""Starts its ranks itself, with `mp.spawn`. With "fails", rank 1 fails while it has a collective to which no other rank comes."""

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import wooly.link

wooly.link.COLLECTIVES_S = 1000.0  # to wait for a collective in vain would outlast the test


def work(rank, size, port, fails):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    x = torch.full((4,), rank + 1.0, device=f"cuda:{rank}")
    dist.all_reduce(x)
    print(f"rank {rank} of {size} sees {torch.cuda.device_count()} devices: sum {x[0].item()}", flush=True)
    if fails:
        other = dist.new_group(list(range(size)))
        if rank == 1:
            dist.all_reduce(x, group=other)
            raise ValueError("broken")
        while True:
            x = (x * 1.0001).clamp(max=2)
            torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(work, args=(3, port, "fails" in sys.argv), nprocs=3)
