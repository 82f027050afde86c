"""Reads what the text of a tensor shows in one piece, before PyTorch makes the text.

PyTorch reads each row, and for integers and whole numbers each element, on its own. On a remote device each of these is a round
trip.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wooly.devices import NAME
from wooly.torch_private import print_options, raw_device


def host_part(t: Tensor) -> Tensor:
    """Copy what the text of a device tensor shows to the host; return other tensors as they are.

    Of a tensor that PyTorch abbreviates, only the elements at the edges and some in the middle are copied. The copy has the same
    text, because it has more elements than the threshold, and each abbreviated dimension is still longer than its two edges.
    """
    if type(t) not in (Tensor, torch.nn.Parameter) or raw_device(t).type != NAME or t.layout is not torch.strided:
        return t
    threshold, edge = print_options()
    part = t.detach()
    if t.numel() > threshold:
        for dim, length in enumerate(_lengths(tuple(t.shape), threshold, edge)):
            if length < t.shape[dim]:
                ends = part.narrow(dim, 0, length - edge), part.narrow(dim, t.shape[dim] - edge, edge)
                part = torch.cat(ends, dim)
    return part.cpu()


def _lengths(sizes: tuple[int, ...], threshold: float, edge: int) -> list[int]:
    """How much of each dimension is copied: together more than `threshold` elements, and more than two edges of a longer one."""
    lengths = list(sizes)
    for dim in sorted(range(len(sizes)), key=lambda d: -sizes[d]):
        rest = 1
        for other, length in enumerate(lengths):
            rest *= length if other != dim else 1
        lengths[dim] = min(sizes[dim], max(2 * edge + 1, int(threshold) // rest + 1))
    return lengths
