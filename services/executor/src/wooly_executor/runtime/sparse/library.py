"""Defines the operators of the namespace `wooly_sparse` in this process. `operators` has their kernels."""

from __future__ import annotations

import torch
from wooly_wis.sparse import DYNAMIC, NAMESPACE, SCHEMAS

from wooly_executor.runtime.torch_private import OpOverload

#: A fragment, because a client in the same process defines the same operators.
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def _define() -> dict[str, OpOverload]:
    for name, schema in SCHEMAS.items():
        if not hasattr(getattr(torch.ops, NAMESPACE), name):
            LIBRARY.define(schema, tags=(torch.Tag.dynamic_output_shape,) if name in DYNAMIC else ())
    return {f"{NAMESPACE}.{name}.default": getattr(getattr(torch.ops, NAMESPACE), name).default for name in SCHEMAS}


#: The operators by the name that `extern` gives them.
OPERATORS: dict[str, OpOverload] = _define()
