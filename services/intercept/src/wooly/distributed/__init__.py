"""torch.distributed on Wooly's devices: the backend "nccl", and "gloo" on copies (`host_groups`).

`group` is the process group that scripts use. A *carrier* moves and reduces its data: `frames` on the executors of the ranks'
sessions, `clients` through the memory of the ranks' processes. `peers` lets executors work together.
`patches` makes PyTorch use the group.
"""
