"""Ranks that let DeviceMesh choose their device. One ends at once, while the other has not come to their collective yet."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
assert not torch.cuda.is_initialized()
init_device_mesh("cuda", (2,))
assert torch.cuda.is_initialized() and torch.cuda.current_device() == local_rank
x = torch.full((4,), local_rank + 1.0, device="cuda")
assert x.device.index == local_rank
if local_rank == 0:
    time.sleep(2)  # longer than a session usually waits for its end
dist.all_reduce(x)
if "destroy" in sys.argv:
    dist.destroy_process_group()
if local_rank == 0:
    print(x.tolist(), flush=True)
elif "destroy" in sys.argv:
    os._exit(0)
