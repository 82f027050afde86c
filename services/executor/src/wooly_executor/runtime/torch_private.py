"""The private torch names that the executor leans on, in one file. Checked against torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._dynamo.guards import _reinterpret_tensor

#: `reinterpret(t, sizes, strides, offset_increment)`: a new tensor on the storage of `t`, same dtype (0.6 us).
reinterpret: Callable[..., torch.Tensor] = _reinterpret_tensor

#: A view that reads as the negative of a tensor.
neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
