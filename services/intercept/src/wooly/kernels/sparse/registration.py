"""Registers the kernels of operators on sparse tensors."""

from __future__ import annotations

import torch

from wooly.devices import Devices
from wooly.kernels.sparse.calls import HOST_KEYS, SparseCalls
from wooly.kernels.sparse.factories import register_factories
from wooly.torch_private import all_aten_overloads, operators_with_kernel

#: Operators that make a sparse tensor of dense ones, or check its components. Their arguments are dense.
_FROM_DENSE = frozenset(
    (
        *("_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc"),
        "_validate_compressed_sparse_indices",
    )
)


def register_sparse(calls: SparseCalls, devices: Devices) -> list[torch.library.Library]:
    """Register a kernel for each operator that has one for sparse host tensors, and a fallback for the others.

    The registrations live as long as the returned libraries.
    """
    library, rest = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    keys = [(key, operators_with_kernel(host)) for key, host in HOST_KEYS.items()]
    for op in all_aten_overloads():
        name = str(op.name()).removeprefix("aten::")
        for key, on_host in keys:
            if op.name() in on_host:
                library.impl(name, calls.kernel(op, key), key)
        if op.overloadpacket.__name__ in _FROM_DENSE and not name.endswith("out"):
            library.impl(name, calls.kernel(op, "SparsePrivateUse1"), "PrivateUse1", allow_override=True)
    register_factories(library, devices)
    for key in HOST_KEYS:
        rest.fallback(calls, key)
    return [library, rest]
