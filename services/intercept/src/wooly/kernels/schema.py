"""Facts from an operator's schema about its arguments and results, and the arguments of one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wooly.torch_private import OpOverload, schema_of, tree_leaves

#: A function that PyTorch's dispatcher calls for an operator.
Kernel = Callable[..., Any]

#: Operators whose scalars determine the size of the result. So their scalars are part of the signature, not params.
SHAPED_BY_SCALARS = frozenset({"arange", "range", "linspace", "logspace"})
#: Arguments that operators write although their schemas do not declare it.
_WRITES_UNSAID = {
    "aten.batch_norm_update_stats.default": ("running_mean", "running_var"),
    "aten.mkldnn_rnn_layer_backward.default": ("workspace",),
}
#: Operators that PyTorch calls with an undefined gradient, the first argument. All their results are undefined then.
PASSING_UNDEFINED = frozenset({"aten._scaled_dot_product_flash_attention_for_cpu_backward.default"})
#: Types of arguments whose numbers become params. PyTorch accepts a Python number in place of a tensor. The kernel then gets the
#: number.
_NUMBERS = frozenset({"number", "Optional[number]", "List[number]", "Tensor", "Optional[Tensor]"})


class Call(NamedTuple):
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def tensors_of(call: Call) -> list[Tensor]:
    """All tensors in the arguments of a call, in order."""
    return [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor)]


def host_tensor_at(op: OpOverload) -> int | None:
    """Position of the argument `batch_sizes`, a host tensor with the lengths of packed sequences; None if there is none."""
    if op.namespace != "aten":
        return None
    arguments = enumerate(schema_of(op).arguments)
    return next((i for i, a in arguments if a.name == "batch_sizes" and str(a.type) == "Tensor"), None)


class OpFacts:
    """Facts from the schema of one operator overload.

    Attributes:
        op: the overload.
        name: full name, for example ``aten.add.Tensor``.
        extension: whether another library than PyTorch, or a script, registers the operator.
        wants_tensor: per positional argument, whether the schema requires a tensor.
        scalar: per positional argument, whether a number there becomes a param.
        scalar_kw: names of the keyword-only arguments whose numbers become params.
        written: names of the arguments that the operator writes.
        returns_written: per result, the name of the argument that is returned; None: a new tensor.
        dynamic: whether the shape of the result depends on data.
        each_alone: whether the operator processes each tensor of a list separately. The tensors may be on several devices.
        random: whether the operator draws random numbers.
        host_at: position of the argument that is a host tensor (`host_tensor_at`); its values become constants of the form.
        generator: position of the generator argument; None: the operator takes no generator.
    """

    __slots__ = (
        "_dropout",
        "dynamic",
        "each_alone",
        "extension",
        "generator",
        "host_at",
        "list_return",
        "mutable",
        "n_returns",
        "name",
        "op",
        "out_args",
        "positions",
        "random",
        "returns_written",
        "scalar",
        "scalar_kw",
        "wants_tensor",
        "written",
    )

    def __init__(self, op: OpOverload) -> None:
        schema = schema_of(op)
        self.op = op
        self.name = str(op)
        self.extension = op.namespace != "aten"
        lift = self.extension or op.overloadpacket.__name__ not in SHAPED_BY_SCALARS
        # Each attribute of an argument is a call into PyTorch, and a process starts with more than a thousand operators.
        arguments = [(a.name, str(a.type), a.kwarg_only, a.alias_info) for a in schema.arguments]
        positional = [(name, kind) for name, kind, kwarg_only, _ in arguments if not kwarg_only]
        self.host_at = host_tensor_at(op)
        self.scalar = tuple([lift and kind in _NUMBERS and i != self.host_at for i, (_, kind) in enumerate(positional)])
        self.wants_tensor = tuple(["Tensor" in kind for _, kind in positional])
        self.scalar_kw = frozenset([name for name, kind, only, _ in arguments if only and lift and kind in _NUMBERS])
        self.positions = {name: i for i, (name, _) in enumerate(positional)}
        said = tuple([name for name, _, _, alias in arguments if alias is not None and alias.is_write])
        self.written = said + _WRITES_UNSAID.get(self.name, ())
        self.out_args = tuple([a.name for a in schema.arguments if a.is_out])
        self.mutable = bool(self.written)
        returns = schema.returns
        self.n_returns = len(returns)
        self.list_return = self.n_returns == 1 and str(returns[0].type) == "List[Tensor]"
        owner = {frozenset(alias.before_set): name for name, _, _, alias in arguments if alias is not None}
        aliases = [r.alias_info for r in returns]
        self.returns_written = tuple([a if a is None else owner.get(frozenset(a.before_set)) for a in aliases])
        self.each_alone = not self.extension and op.overloadpacket.__name__.startswith("_foreach_")
        tags = op.tags
        self.dynamic = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        self.random = torch.Tag.nondeterministic_seeded in tags
        self.generator = next((i for i, (_, kind, *_) in enumerate(arguments) if "Generator" in kind), None)
        self._dropout = None if self.extension else self.positions.get("dropout_p")

    def draws(self, call: Call) -> bool:
        """Whether this call draws random numbers. Attention without dropout draws none."""
        i = self._dropout
        return self.random and (i is None or (i < len(call.args) and call.args[i] != 0))


def passing_undefined(name: str, kernel: Kernel) -> Kernel:
    """The kernel of a backward, so that an undefined gradient, which it sees as None, gives undefined results.

    Autograd calls the backward of attention also without a gradient. The kernels of other operators come back unchanged.
    """
    if not name.endswith("_backward"):
        return kernel
    results = len(schema_of(getattr(torch.ops.aten, name).default).returns)

    @functools.wraps(kernel)
    def run(grad: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        return (None,) * results if grad is None else kernel(grad, *args, **kwargs)

    return run


def unsupported(name: str, why: str) -> NotImplementedError:
    """Make the error for an operator that the device does not support."""
    return NotImplementedError(f"{name} is not supported on the wooly device: {why}; compute it on the CPU: x.cpu()")
