"""Trains a small network with DistributedDataParallel and Adam. Each rank prints a digest of its losses and of the weights.

ranks.py STEPS     LOSE_RANK: the rank whose executor is lost at the steps in LOSE
                   AGAIN: the step at which the ranks make their groups again
                   GRAPH: from the fifth step on, each step is a replay of a CUDA graph
                   LEAST_SHARE: least bytes of a share of a collective that is divided among executors
"""

import hashlib
import os
import sys
import warnings

if f"RECOVERY_OF_RANK_{os.environ['RANK']}" in os.environ:
    os.environ["WOOLYAI_RECOVERY"] = os.environ[f"RECOVERY_OF_RANK_{os.environ['RANK']}"]

import losing
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

if "LEAST_SHARE" in os.environ:
    from wooly.distributed import peers

    peers.LEAST_SHARE = int(os.environ["LEAST_SHARE"])
warnings.simplefilter("ignore")
steps = int(sys.argv[1])
local_rank = int(os.environ["LOCAL_RANK"])


def groups():
    """Make the group of all ranks. Returns groups of two."""
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    return [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]


pairs = groups()
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(local_rank)
torch.manual_seed(1 + rank)  # DDP gives all ranks the weights of the first one
network = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64), nn.Linear(64, 8)).to("cuda")
model = DDP(network, device_ids=[local_rank])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, capturable="GRAPH" in os.environ)
data = torch.randn(512, 32)
labels = torch.randint(0, 8, (512,))
losses = []
graph = None
inputs, targets = torch.zeros(16, 32, device="cuda"), torch.zeros(16, dtype=torch.int64, device="cuda")


def train(x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


for step in range(steps):
    if rank == int(os.environ.get("LOSE_RANK", "0")):
        losing.step(step)
    if step == int(os.environ.get("AGAIN", "-1")):
        dist.destroy_process_group()
        pairs = groups()
        model = DDP(network, device_ids=[local_rank])
    at = step * 16 % 496
    x, y = data[at : at + 16].to("cuda"), labels[at : at + 16].to("cuda")
    if "GRAPH" in os.environ and step == 4:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = train(inputs, targets)
    if graph is None:
        loss = train(x, y)
    else:
        inputs.copy_(x)
        targets.copy_(y)
        graph.replay()
        loss = result
    if step % 5 == 0:
        both = loss.detach().clone()
        dist.all_reduce(both, group=pairs[rank // 2])
        losses += [loss.item(), both.item()]
said = hashlib.sha256(repr(losses).encode())
for p in model.parameters():
    said.update(p.detach().cpu().numpy().tobytes())
os.write(1, f"rank {rank}: {said.hexdigest()} {losses[-2]}\n".encode())  # at once, because the ranks share the output
dist.destroy_process_group()
