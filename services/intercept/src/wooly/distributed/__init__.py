"""torch.distributed on Wooly's devices: the backend "nccl".

`group` is the process group that scripts use. A *carrier* moves and reduces its data: `frames` on the executor that has the
sessions of all ranks, `clients` through the memory of the ranks' processes. `patches` makes PyTorch use the group.
"""
