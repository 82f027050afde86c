"""Makes a mistake after the loss of its executor. Prints the Python line that the error names."""

import losing
import torch

x = torch.arange(4.0).to("cuda")
print(x.sum().item())
losing.step(0)
y = x + 1
print(y.sum().item())
z = x.index_select(0, torch.tensor([9]).to("cuda"))  # the mistake
try:
    z.sum().item()
except Exception as e:
    print(e.recorded_at)
