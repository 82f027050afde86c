"""The scan of prompts in the first form of Mamba, as a kernel in Triton. vLLM has only one compiled for CUDA.

Decoding needs none: vLLM's kernel for one token is Triton's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

#: Largest number of channels that a program computes.
CHANNELS = 32


# Triton refuses annotations of types.
@triton.jit(do_not_specialize=["channels", "size", "null"])  # type: ignore[untyped-decorator]
def _scan(  # type: ignore[no-untyped-def] # noqa: ANN202
    x, step, rates, inward, outward, direct, gate, bias, out, states, starts, slots, continued,  # noqa: ANN001
    channels, size, null, x_stride, step_stride, rate_stride, in_stride, out_stride, gate_stride, slot_stride,  # noqa: ANN001
    state_strides_0, state_strides_1, state_strides_2,  # noqa: ANN001
    SOFTPLUS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Program (s, c) computes part c of the channels of sequence s, token by token, and writes the last state to the cache."""
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence * slot_stride).to(tl.int64)
    if slot != null:
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        n = tl.arange(0, SIZE)
        mine, used = channel < channels, n < size
        both = mine[:, None] & used[None, :]
        rate = tl.load(rates + channel[:, None] * rate_stride + n[None, :], mask=both, other=0.0)
        shift = tl.load(bias + channel, mask=mine, other=0.0) if bias is not None else tl.zeros([CHANNELS], tl.float32)
        skip = (
            tl.load(direct + channel, mask=mine, other=0.0) if direct is not None else tl.zeros([CHANNELS], tl.float32)
        )
        at = states + slot * state_strides_0 + channel[:, None] * state_strides_1 + n[None, :] * state_strides_2
        state = tl.zeros([CHANNELS, SIZE], tl.float32)
        if continued is not None:
            state = tl.load(at, mask=both & (tl.load(continued + sequence) != 0), other=0.0).to(tl.float32)
        for t in range(tl.load(starts + sequence), tl.load(starts + sequence + 1)):
            value = tl.load(x + channel * x_stride + t, mask=mine, other=0.0).to(tl.float32)
            length = tl.load(step + channel * step_stride + t, mask=mine, other=0.0).to(tl.float32) + shift
            if SOFTPLUS:  # log(1 + e) loses digits if e is small; the quotient gives them back
                e = tl.exp(tl.minimum(length, 20.0))
                whole = 1.0 + e
                length = tl.where(length > 20.0, length, tl.where(whole == 1.0, e, tl.log(whole) * (e / (whole - 1.0))))
            b = tl.load(inward + n * in_stride + t, mask=used, other=0.0).to(tl.float32)
            c = tl.load(outward + n * out_stride + t, mask=used, other=0.0).to(tl.float32)
            state = tl.exp(length[:, None] * rate) * state + (length * value)[:, None] * b[None, :]
            result = tl.sum(state * c[None, :], 1) + skip * value
            if gate is not None:
                factor = tl.load(gate + channel * gate_stride + t, mask=mine, other=0.0).to(tl.float32)
                result *= factor * tl.sigmoid(factor)
            stride = step_stride if gate is None else gate_stride
            tl.store(out + channel * stride + t, result.to(out.dtype.element_ty), mask=mine)
        tl.store(at, state.to(states.dtype.element_ty), mask=both)


def scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D_: Tensor | None,
    z_: Tensor | None,
    delta_bias_: Tensor | None,
    delta_softplus: bool,
    query_start_loc: Tensor | None,
    cache_indices: Tensor | None,
    has_initial_state: Tensor | None,
    ssm_states: Tensor,
    null_block_id: int,
    block_size: int = 1024,
    block_idx_first_scheduled_token: Tensor | None = None,
    *positions: Tensor | None,
) -> None:
    """Replaces `selective_scan_fwd`: `h = exp(d A) h + d B u`, `y = C h + D u` from token to token; `d = softplus(delta)`.

    Args:
        u: input `[channels, tokens]` of several sequences.
        delta: lengths of the steps `[channels, tokens]`.
        A: rates `[channels, size]`.
        B: input's part in the state `[1, size, tokens]`.
        C: state's part in the result `[1, size, tokens]`.
        D_: input's part in the result `[channels]`.
        z_: gate `[channels, tokens]`: the result is multiplied by `silu(z)` and written there; None: it is written to `delta`.
        delta_bias_: added to `delta` `[channels]`.
        delta_softplus: whether `softplus` is used.
        query_start_loc: begin of each sequence, and the end of the last one.
        cache_indices: the place of each sequence's state in the cache.
        has_initial_state: whether a sequence begins with the state there; otherwise with 0.
        ssm_states: the cache `[places, channels, size]`.
        null_block_id: the place of padding, which is not computed.
        block_size: not used.
        block_idx_first_scheduled_token: given if the states of several blocks are wanted.
        positions: not used: the last state does not depend on where vLLM cuts a prompt.

    Raises:
        NotImplementedError: sequences of one length each, several groups, or states of several blocks.
    """
    if (
        query_start_loc is None
        or cache_indices is None
        or B.shape[0] != 1
        or block_idx_first_scheduled_token is not None
    ):
        raise NotImplementedError(
            "this form of the selective scan is not supported on Wooly's device; vLLM 0.32 does not use it"
        )
    channels, size = A.shape
    part = min(CHANNELS, triton.next_power_of_2(channels))
    _scan[(query_start_loc.shape[0] - 1, triton.cdiv(channels, part))](
        u, delta, A, B, C, D_, z_, delta_bias_, delta if z_ is None else z_, ssm_states, query_start_loc, cache_indices,
        has_initial_state, channels, size, null_block_id, u.stride(0), delta.stride(0), A.stride(0), B.stride(1), C.stride(1),
        0 if z_ is None else z_.stride(0), cache_indices.stride(0), *ssm_states.stride(),
        SOFTPLUS=delta_softplus, CHANNELS=part, SIZE=triton.next_power_of_2(size),
    )  # fmt: skip
