"""Makes the group of all ranks, and a group of the same ranks, again and again in one store."""

import torch
import torch.distributed as dist

for number in range(5):
    dist.init_process_group("nccl")
    other = dist.new_group([1, 0])
    found = torch.ones(4, device="cuda") * (dist.get_rank() + number)
    dist.all_reduce(found)
    dist.all_reduce(found, group=other)
    assert found.tolist() == [2.0 * (1 + 2 * number)] * 4, found
    dist.destroy_process_group(other)
    try:
        dist.all_reduce(found, group=other)
    except (dist.DistBackendError, ValueError):  # PyTorch looks up the group for its log, and does not find it
        pass
    else:
        raise AssertionError("a group that was destroyed was used")
    assert found.tolist() == [2.0 * (1 + 2 * number)] * 4, found
    dist.destroy_process_group()
print("all groups agree")
