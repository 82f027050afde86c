"""Attention and recurrent layers: heads, states and weights that go together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from wooly_executor.runtime.guards.law import (
    ArgumentLaw,
    Arguments,
    Check,
    counted,
    numbers_of,
    require,
    sized,
)

aten = torch.ops.aten


def _attention(given: Arguments) -> None:
    query, key, value = [given[n] for n in ("query", "key", "value")]
    for name, t in (("query", query), ("key", key), ("value", value)):
        require(t.dim() == 4 and t.numel() > 0, f"{name} must have 4 dimensions, and elements")
    batch, heads, _, width = query.shape
    require(heads % key.shape[1] == 0, f"the {key.shape[1]} heads of key must divide the {heads} of query")
    sized(given, "key", [batch, key.shape[1], key.shape[2], width])
    sized(given, "value", key.shape)
    mask = given.get("attn_mask")
    if mask is not None:
        scores = [batch, heads, query.shape[2], key.shape[2]]
        fits = mask.dim() in (2, 4) and all(m in (1, s) for m, s in zip(mask.shape, scores[-mask.dim() :], strict=True))
        require(fits, f"attn_mask of shape {list(mask.shape)} does not broadcast to {scores}")


def _attention_backward(given: Arguments) -> None:
    _attention(given)
    for name in ("grad_out", "out"):
        sized(given, name, given["query"].shape)
    counted(given, "logsumexp", given["query"].shape[:3].numel())


def _heads(name: str) -> Check:
    def check(given: Arguments) -> None:
        require(given[name] > 0 and given["embed_dim"] % given[name] == 0, f"{name} must divide embed_dim")

    return check


#: Gates of a recurrent layer, by the number that the library has for its mode: LSTM is the one that it takes.
_LSTM, _GATES = 2, 4


def _recurrent(weights: Sequence[str], cell: str) -> Check:
    def check(given: Arguments) -> None:
        t, hidden = given["input"], given["hidden_size"]
        require(t.dim() == 3 and t.numel() > 0, "input must have 3 dimensions, and elements")
        require(given["mode"] == _LSTM and hidden > 0, "this operator is of LSTM layers alone")
        require(not given["batch_sizes"] and not given["batch_first"], "this operator takes no packed sequences")
        _, batch, width = t.shape
        rows = _GATES * hidden
        sized(given, weights[0], [rows, width])
        sized(given, weights[1], [rows, hidden])
        for name in weights[2:]:
            counted(given, name, rows if given["has_biases"] else given[name].numel())
        for name in ("hx_", cell):
            counted(given, name, batch * hidden)

    return check


def _layers(gates: int) -> Check:
    """A recurrent network: weights of each layer and direction, as its module has them."""

    def check(given: Arguments) -> None:
        packed = "data" in given
        data, states = given["data" if packed else "input"], given["hx"]
        require(data.dim() == (2 if packed else 3), f"input must have {2 if packed else 3} dimensions")
        require(not isinstance(states, list) or len(states) == 2, "hx must be a hidden state and a cell state")
        out = states[0] if isinstance(states, list) else states
        cell = states[1] if isinstance(states, list) else states
        for t in (out, cell):
            require(
                t.dim() == 3 and t.shape[:2] == out.shape[:2], "hx must have 3 dimensions, of the same layers and batch"
            )
        directions = 2 if given["bidirectional"] else 1
        require(
            given["num_layers"] > 0 and out.shape[0] == given["num_layers"] * directions, "hx must be of all layers"
        )
        if not packed:
            require(out.shape[1] == data.shape[0 if given["batch_first"] else 1], "hx must be of input's batch")
        hidden, width, rows = cell.shape[2], out.shape[2], gates * cell.shape[2]
        each = [[rows], [rows]] if given["has_biases"] else []
        more = [[width, hidden]] if width != hidden else []
        wanted = []
        for layer in range(given["num_layers"]):
            taken = data.shape[-1] if not layer else width * directions
            wanted += [[rows, taken], [rows, width], *each, *more] * directions
        found = [list(t.shape) for t in given["params"]]
        require(found == wanted, f"params must have shapes {wanted}, they have {found}")
        if packed:
            sizes = given["batch_sizes"]
            require(sizes.dim() == 1 and sizes.numel() > 0, "batch_sizes must have 1 dimension, and elements")

    return check


def _batches(given: Arguments) -> None:
    """The batch of a packed sequence shrinks, and its steps are all of the data."""
    if "batch_sizes" in given:
        sizes, states = numbers_of(given, "batch_sizes"), given["hx"]
        batch = (states[0] if isinstance(states, list) else states).shape[1]
        falls = all(a >= b for a, b in pairwise(sizes))
        fits = sizes[0] == batch and sizes[-1] > 0 and sum(sizes) == given["data"].shape[0]
        require(falls and fits, f"batch_sizes must fall from {batch}, and sum to {given['data'].shape[0]}")


def _recurrent_backward(given: Arguments) -> None:
    _recurrent(("weight1", "weight2", "weight3", "weight4"), "cx_tmp")(given)
    length, batch, _ = given["input"].shape
    for name in ("output", "grad_output"):
        if given[name] is not None:
            sized(given, name, [length, batch, given["hidden_size"]])
    for name in ("hy_", "cy_", "grad_hy", "grad_cy"):
        if given[name] is not None:
            counted(given, name, batch * given["hidden_size"])
    # How large it is only the library's layer knows: it says so for tensors like these.
    zeros = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in given.items() if isinstance(t, Tensor)}
    weights = [zeros[n] for n in ("weight1", "weight2", "weight3", "weight4")]
    numbers = [given[n] for n in ("mode", "hidden_size", "num_layers", "has_biases", "bidirectional", "batch_first")]
    with torch.inference_mode(False), torch.enable_grad():
        *_, workspace = aten.mkldnn_rnn_layer.default(
            zeros["input"], *weights, zeros["hx_"], zeros["cx_tmp"], given["reverse"], [], *numbers, True
        )
    counted(given, "workspace", workspace.numel())


LAWS: dict[str, ArgumentLaw] = {
    "_scaled_dot_product_flash_attention_for_cpu": ArgumentLaw(_attention),
    "_scaled_dot_product_flash_attention_for_cpu_backward": ArgumentLaw(_attention_backward),
    "_native_multi_head_attention": ArgumentLaw(_heads("num_head")),
    "_transformer_encoder_layer_fwd": ArgumentLaw(_heads("num_heads")),
    "mkldnn_rnn_layer": ArgumentLaw(_recurrent(("weight0", "weight1", "weight2", "weight3"), "cx_")),
    "mkldnn_rnn_layer_backward": ArgumentLaw(_recurrent_backward),
    "lstm": ArgumentLaw(_layers(_GATES), _batches),
    "gru": ArgumentLaw(_layers(3), _batches),
    "rnn_tanh": ArgumentLaw(_layers(1), _batches),
    "rnn_relu": ArgumentLaw(_layers(1), _batches),
}
