"""What ranks see if another rank dies, asks for something else, or does not come: python waiting.py CASE"""

import datetime
import os
import sys
import time

import torch
import torch.distributed as dist

case = sys.argv[1]
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=1 if case == "late" else 250))
rank = dist.get_rank()
x = torch.ones(4, device="cuda")
dist.all_reduce(x)
x.cpu()
os.write(1, b"ready\n")  # in one piece, because ranks may share the output
if (case, rank) in (("killed", 1), ("first killed", 0)):
    time.sleep(250)  # until the test kills this rank
if case == "late" and rank == 1:
    time.sleep(250)  # longer than the timeout
try:
    if case == "different" and rank == 1:
        dist.broadcast(x, 0)
    elif case == "slow" and rank == 1:
        time.sleep(0.5)
        dist.all_reduce(x)
    else:
        dist.all_reduce(x)
    print(x.tolist(), flush=True)
except dist.DistBackendError as e:
    print(e, flush=True)
    os._exit(7)
