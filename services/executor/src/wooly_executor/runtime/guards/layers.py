"""Laws for attention and recurrent layers: heads, states and weights must fit together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from wooly_executor.runtime.guards.law import (
    ArgumentLaw,
    Arguments,
    Check,
    numbers_of,
    require,
    require_contiguous,
    require_count,
    require_shape,
)

aten = torch.ops.aten


def _shared_heads(given: Arguments) -> None:
    """Require that there are heads to share: the library divides by their number."""
    if given["enable_gqa"]:
        for name in ("key", "value"):
            require(given[name].dim() >= 3 and given[name].shape[-3] > 0, f"{name} must have at least one head")


def _attention(given: Arguments) -> None:
    query, key, value = [given[n] for n in ("query", "key", "value")]
    for name, t in (("query", query), ("key", key), ("value", value)):
        require(t.dim() == 4 and t.numel() > 0, f"{name} must have 4 dimensions and must not be empty")
        _require_dense_rows(name, t)
    batch, heads, _, width = query.shape
    require(
        heads % key.shape[1] == 0, f"the number of heads of key ({key.shape[1]}) must divide that of query ({heads})"
    )
    require_shape(given, "key", [batch, key.shape[1], key.shape[2], width])
    require_shape(given, "value", key.shape)
    mask = given.get("attn_mask")
    if mask is not None:
        scores = [batch, heads, query.shape[2], key.shape[2]]
        fits = mask.dim() in (2, 4) and all(m in (1, s) for m, s in zip(mask.shape, scores[-mask.dim() :], strict=True))
        require(fits, f"attn_mask of shape {list(mask.shape)} cannot be broadcast to {scores}")


def _require_dense_rows(name: str, t: Tensor) -> None:
    """Require that the elements of the last dimension are adjacent. The kernel ignores its stride."""
    require(t.shape[-1] == 1 or t.stride(-1) == 1, f"the stride of the last dimension of {name} must be 1")


def _attention_backward(given: Arguments) -> None:
    _attention(given)
    for name in ("grad_out", "out"):
        require_shape(given, name, given["query"].shape)
    _require_dense_rows("out", given["out"])
    require_shape(given, "logsumexp", given["query"].shape[:3])


def _heads(name: str, of: str) -> Check:
    """Check the number of heads, and that all tensors have the dtype of the argument `of`. The kernel reads them as such."""

    def check(given: Arguments) -> None:
        for key, t in given.items():
            fits = not isinstance(t, Tensor) or t.dtype == given[of].dtype or "mask" in key
            require(fits, f"{key} must have dtype {given[of].dtype}")
        require(given[name] > 0 and given["embed_dim"] % given[name] == 0, f"{name} must divide embed_dim")

    return check


#: The library's number for LSTM in `mode`, the only mode that mkldnn_rnn_layer accepts, and the number of gates of an LSTM.
_LSTM, _GATES = 2, 4


def _recurrent(weights: Sequence[str], cell: str) -> Check:
    def check(given: Arguments) -> None:
        t, hidden = given["input"], given["hidden_size"]
        require(t.dim() == 3 and t.numel() > 0, "input must have 3 dimensions and must not be empty")
        require(
            given["mode"] == _LSTM and hidden > 0,
            "mode must be 2 (LSTM) and hidden_size must be positive: the operator supports only LSTM layers",
        )
        require(
            not given["batch_sizes"] and not given["batch_first"],
            "the operator does not support packed sequences or batch_first",
        )
        _, batch, width = t.shape
        rows = _GATES * hidden
        require_shape(given, weights[0], [rows, width])
        require_shape(given, weights[1], [rows, hidden])
        for name in weights[2:]:
            require_count(given, name, rows if given["has_biases"] else given[name].numel())
        for name in ("hx_", cell):
            require_count(given, name, batch * hidden)
        for name in ("input", "hx_", cell):
            require_contiguous(name, given[name])

    return check


def _layers(gates: int) -> Check:
    """Return a check for a recurrent network: states and weights of each layer and direction, in the order of `nn.RNNBase`."""

    def check(given: Arguments) -> None:
        packed = "data" in given
        data, states = given["data" if packed else "input"], given["hx"]
        require(data.dim() == (2 if packed else 3), f"input must have {2 if packed else 3} dimensions")
        require(
            not isinstance(states, list) or len(states) == 2, "hx must have two tensors: hidden state and cell state"
        )
        out = states[0] if isinstance(states, list) else states
        cell = states[1] if isinstance(states, list) else states
        for t in (out, cell):
            require(
                t.dim() == 3 and t.shape[:2] == out.shape[:2],
                "all tensors of hx must have 3 dimensions, with equal numbers of layers and equal batch sizes",
            )
        directions = 2 if given["bidirectional"] else 1
        require(
            given["num_layers"] > 0 and out.shape[0] == given["num_layers"] * directions,
            "the first dimension of hx must be num_layers times the number of directions",
        )
        if not packed:
            require(
                out.shape[1] == data.shape[0 if given["batch_first"] else 1],
                "the second dimension of hx must be the batch size of input",
            )
        hidden, width, rows = cell.shape[2], out.shape[2], gates * cell.shape[2]
        each = [[rows], [rows]] if given["has_biases"] else []
        more = [[width, hidden]] if width != hidden else []
        wanted = []
        for layer in range(given["num_layers"]):
            taken = data.shape[-1] if not layer else width * directions
            wanted += [[rows, taken], [rows, width], *each, *more] * directions
        found = [list(t.shape) for t in given["params"]]
        require(found == wanted, f"params must have shapes {wanted}, but they have {found}")
        if packed:
            sizes = given["batch_sizes"]
            require(sizes.dim() == 1 and sizes.numel() > 0, "batch_sizes must have 1 dimension and must not be empty")

    return check


def _batches(given: Arguments) -> None:
    """Require that the batch sizes of a packed sequence do not increase, and that their sum is the number of rows of the data."""
    if "batch_sizes" in given:
        sizes, states = numbers_of(given, "batch_sizes"), given["hx"]
        batch = (states[0] if isinstance(states, list) else states).shape[1]
        falls = all(a >= b for a, b in pairwise(sizes))
        fits = sizes[0] == batch and sizes[-1] > 0 and sum(sizes) == given["data"].shape[0]
        require(
            falls and fits,
            f"batch_sizes must start with {batch}, must not increase, and must sum to {given['data'].shape[0]}",
        )


def _recurrent_backward(given: Arguments) -> None:
    _recurrent(("weight1", "weight2", "weight3", "weight4"), "cx_tmp")(given)
    length, batch, _ = given["input"].shape
    for name in ("output", "grad_output"):
        if given[name] is not None:
            require_shape(given, name, [length, batch, given["hidden_size"]])
    for name in ("hy_", "cy_", "grad_hy", "grad_cy"):
        if given[name] is not None:
            require_count(given, name, batch * given["hidden_size"])
    for name in ("output", "hy_", "cy_"):
        require_contiguous(name, given[name])
    # Only the library knows the size of the workspace: run its layer on zeros of the same shapes, and compare.
    zeros = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in given.items() if isinstance(t, Tensor)}
    weights = [zeros[n] for n in ("weight1", "weight2", "weight3", "weight4")]
    numbers = [given[n] for n in ("mode", "hidden_size", "num_layers", "has_biases", "bidirectional", "batch_first")]
    with torch.inference_mode(False), torch.enable_grad():
        *_, workspace = aten.mkldnn_rnn_layer.default(
            zeros["input"], *weights, zeros["hx_"], zeros["cx_tmp"], given["reverse"], [], *numbers, True
        )
    require_count(given, "workspace", workspace.numel())


LAWS: dict[str, ArgumentLaw] = {
    "_scaled_dot_product_attention_math": ArgumentLaw(_shared_heads),
    "_scaled_dot_product_flash_attention_for_cpu": ArgumentLaw(_attention),
    "_scaled_dot_product_flash_attention_for_cpu_backward": ArgumentLaw(_attention_backward),
    "_native_multi_head_attention": ArgumentLaw(_heads("num_head", "query")),
    "_transformer_encoder_layer_fwd": ArgumentLaw(_heads("num_heads", "src")),
    "mkldnn_rnn_layer": ArgumentLaw(_recurrent(("weight0", "weight1", "weight2", "weight3"), "cx_")),
    "mkldnn_rnn_layer_backward": ArgumentLaw(_recurrent_backward),
    "lstm": ArgumentLaw(_layers(_GATES), _batches),
    "gru": ArgumentLaw(_layers(3), _batches),
    "rnn_tanh": ArgumentLaw(_layers(1), _batches),
    "rnn_relu": ArgumentLaw(_layers(1), _batches),
}
