"""Each rank profiles its own work and prints the device's events. The ranks share one device of the executor."""

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
x = torch.ones(8, device="cuda")
torch.cuda.synchronize()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as p:
    y = x * 2
    dist.all_reduce(y)
    total = y.sum().item()
found = [(e.name, e.device_index) for e in p.events() if e.device_type == DeviceType.CUDA]
print(f"rank {rank}: {total} {found} {any(e.device_memory_usage > 0 for e in p.events())}")
dist.destroy_process_group()
