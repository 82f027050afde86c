"""Starts its ranks itself, with `mp.spawn`."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, size, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    x = torch.full((4,), rank + 1.0, device=f"cuda:{rank}")
    dist.all_reduce(x)
    print(f"rank {rank} of {size} sees {torch.cuda.device_count()} devices: sum {x[0].item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(work, args=(3, port), nprocs=3)
