"""Writes and gathers block tables of vLLM's model runner V2 on "cuda", and prints them as JSON. `test_tables.py` runs it."""

import inspect
import json

import torch
import wooly_vllm.replacements
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.block_table import BlockTables

assert current_platform.is_out_of_tree(), current_platform
wooly_vllm.replacements.install()
device = torch.device("cuda")
windows = "sliding_window_reach" in inspect.signature(BlockTables.__init__).parameters  # since vLLM 0.33
names = set(inspect.signature(BlockTables.__init__).parameters)
sizes = {
    "block_sizes": [2, 2],
    "max_num_reqs": 4,
    "max_num_batched_tokens": 16,
    "max_num_blocks_per_group": [4096, 4096],
    "device": device,
}
if windows:
    sizes["sliding_window_reach"] = [0, 4]
assert sizes.keys() <= names, names
tables = BlockTables(**sizes)
long, short = list(range(1, 3001)), list(range(5001, 5008))
for row, blocks in ((2, long), (0, short)):
    tables.append_block_ids(row, (blocks, blocks), overwrite=True)
tables.apply_staged_writes()
computed = torch.tensor([9, 0, 11, 0], dtype=torch.int32, device=device)
more = {"num_computed_tokens": computed} if windows else {}
first = tables.gather_block_tables(torch.tensor([2, 0], dtype=torch.int32, device=device), 3, **more)
first = [t[:, :3000].tolist() for t in first]
second = tables.gather_block_tables(torch.tensor([0], dtype=torch.int32, device=device), 1, **more)
beyond = [t[1, :4].tolist() for t in tables.input_block_tables]
print(json.dumps({"windows": windows, "first": first, "second": [t[:, :7].tolist() for t in second], "beyond": beyond}))
