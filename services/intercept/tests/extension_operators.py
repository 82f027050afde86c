"""A library of extension operators for tests, as its users import it on both sides. It stands for native code.

With `EXTENSION_OPERATORS_VERSION=2`, one operator has other arguments.
"""

import os

import torch

__version__ = os.environ.get("EXTENSION_OPERATORS_VERSION", "1")

_LIBRARY = torch.library.Library("extension_operators", "DEF")


def _operator(schema, kernel, fake=None, autograd=None):
    _LIBRARY.define(schema)
    name = f"extension_operators::{schema.partition('(')[0]}"
    _LIBRARY.impl(schema.partition("(")[0], kernel, "CPU")
    if fake is not None:
        torch.library.register_fake(name, fake, lib=_LIBRARY)
    if autograd is not None:
        torch.library.register_autograd(name, autograd[0], setup_context=autograd[1], lib=_LIBRARY)


def _keep_factor(ctx, inputs, output):
    ctx.by = inputs[1]


def _above(x, limit):
    return x[x > limit]


def _increase(x, by):
    x.add_(by)


_operator(
    "scale(Tensor x, float by) -> Tensor",
    lambda x, by: x * by,
    lambda x, by: torch.empty_like(x),
    (lambda ctx, g: (torch.ops.extension_operators.scale(g, ctx.by), None), _keep_factor),
)
_operator(
    "above(Tensor x, float limit) -> Tensor",
    _above,
    lambda x, limit: x.new_empty(torch.library.get_ctx().new_dynamic_size()),
)
_operator("head(Tensor x) -> Tensor", lambda x: x.flatten()[:3] + 1)
_operator("increase_(Tensor(a!) x, int by) -> ()", _increase, lambda x, by: None)
_operator(
    "both(Tensor[] xs, Tensor? y=None) -> (Tensor, Tensor)",
    lambda xs, y=None: (xs[0] + xs[1], xs[0] * (2 if y is None else y)),
    lambda xs, y=None: (torch.empty_like(xs[0]), torch.empty_like(xs[0])),
)
#: Leaves its result unwritten: on the executor it must be zero, not the memory of another session.
_operator("unwritten(Tensor x) -> Tensor", torch.empty_like, torch.empty_like)
#: An operator named like one of PyTorch's that Wooly knows.
_operator("add(Tensor x) -> Tensor", lambda x: x + 100, torch.empty_like)
_operator("view_of(Tensor(a) x) -> Tensor(a)", lambda x: x.view(-1), lambda x: x.view(-1))
if __version__ == "1":
    _operator("changed(Tensor x, float by) -> Tensor", lambda x, by: x * by, lambda x, by: torch.empty_like(x))
else:
    _operator("changed(Tensor x, int by) -> Tensor", lambda x, by: x * by, lambda x, by: torch.empty_like(x))
