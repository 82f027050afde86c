"""Ranks that compute without collectives, until their session ends. With "fails", rank 1 fails while it has a collective to which
rank 0 does not come.
"""

import os
import sys

import torch
import torch.distributed as dist
import wooly.link

wooly.link.COLLECTIVES_S = 1000.0  # to wait for a collective in vain would outlast the test
dist.init_process_group("nccl")
x = torch.ones(64, device="cuda")
other = dist.new_group([0, 1])
os.write(1, b"ready\n")  # in one piece, because ranks may share the output
if "fails" in sys.argv and dist.get_rank() == 1:
    dist.all_reduce(x, group=other)
    raise ValueError("broken")
while True:
    x = (x * 1.0001).clamp(max=2)
    torch.cuda.synchronize()
