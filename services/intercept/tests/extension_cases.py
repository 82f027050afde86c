"""Calls extension operators on "cuda" and prints, as JSON, what each case gives. `test_extensions.py` runs it as a process.

Arguments: endpoint, session id and token of an executor; then the names of the cases, or none for all cases.
"""

import json
import sys

import extension_operators  # noqa: F401 - it registers operators
import torch
import triton
import triton.language as tl
from wooly import api


def _scaled(x):
    x = x.clone().requires_grad_()
    torch.ops.extension_operators.scale(x, 3.0).sum().backward()
    return x.grad


def _increased(x):
    y = x.clone()
    torch.ops.extension_operators.increase_(y, 3)
    return y


def _compiled(x):
    return torch.compile(lambda a: torch.ops.extension_operators.scale(a, 2.0).relu())(x)


#: The operator of torchaudio whose kernel for "cuda" is Wooly's.
_torchaudio = torch.library.Library("torchaudio", "FRAGMENT")
_torchaudio.define("_lfilter_core_loop(Tensor signal, Tensor a, Tensor(a!) padded) -> Tensor(a!)")


def _filtered(dtype):
    """The greatest difference from torchaudio's kernel for CPUs, for two signals of two channels with strides."""

    def call(_):
        signal = torch.linspace(-1, 1, 2 * 2 * 500, dtype=dtype).view(500, 2, 2).permute(2, 1, 0)
        a = torch.tensor([[0.3, -0.7, 1], [-0.2, 0.1, 1]], dtype=dtype)
        padded = torch.zeros(2, 2, 502, dtype=dtype)
        found = torch.ops.torchaudio._lfilter_core_loop(*[t.to("cuda") for t in (signal, a, padded)])
        for i in range(500):
            sample = signal[:, :, i]
            for k in range(3):
                sample = sample - a[:, k] * padded[:, :, i + k]
            padded[:, :, i + 2] = sample
        return (found.cpu() - padded).abs().max()

    return call


def _own(body):
    def call(x):
        name = f"extension_cases::{body.__name__}"
        op = torch.library.custom_op(name, body, mutates_args=(), device_types=body.devices)
        return op(x)

    return call


def _for_devices(devices):
    def mark(body):
        body.devices = devices
        return body

    return mark


@_for_devices("cuda")
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@_for_devices(None)
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@_for_devices("cpu")
def on_host(x: torch.Tensor) -> torch.Tensor:
    return x * 4


@_for_devices("cuda")
def by_address(x: torch.Tensor) -> torch.Tensor:
    x.data_ptr()
    return x * 3


@triton.jit
def _add_seven(source, target, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n) + 7, mask=at < n)


@_for_devices("cuda")
def by_triton(x: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(x)
    _add_seven[(1,)](x, result, x.numel(), BLOCK=8)
    return result


CASES = {
    "scale": lambda x: torch.ops.extension_operators.scale(x, 2.0),
    "gradient": _scaled,
    "data-dependent": lambda x: [torch.ops.extension_operators.above(x, limit) for limit in (1.0, 3.0, 9.0)],
    "no fake kernel": lambda x: torch.ops.extension_operators.head(x),
    "in place": _increased,
    "several results": lambda x: torch.ops.extension_operators.both([x, x], None),
    "optional tensor": lambda x: torch.ops.extension_operators.both([x, x], x),
    "unwritten": lambda x: torch.ops.extension_operators.unwritten(torch.cat([x] * 4096)).abs().sum(),
    "known name": lambda x: torch.ops.extension_operators.add(x),
    "view": lambda x: torch.ops.extension_operators.view_of(x),
    "compiled": _compiled,
    "mixed devices": lambda x: torch.ops.extension_operators.both([x, x.cpu()], None),
    "changed": lambda x: torch.ops.extension_operators.changed(x, 2),
    "kernel for cuda": _own(tripled),
    "kernel for all": _own(doubled),
    "kernel for cpu": _own(on_host),
    "address": _own(by_address),
    "kernel in Triton": _own(by_triton),
    "recursive filter": _filtered(torch.float32),
    "recursive filter in float64": _filtered(torch.float64),
    "recursive filter in float16": _filtered(torch.float16),
}


def main(endpoint, session_id, token, *chosen):
    api.attach([endpoint], session_id, token)
    api.install_facade()
    x = torch.arange(5.0, device="cuda")
    found = {}
    for name in chosen or CASES:
        try:
            result = CASES[name](x)
            many = isinstance(result, (list, tuple))
            found[name] = [t.tolist() for t in result] if many else result.tolist()
        except Exception as e:
            found[name] = f"{type(e).__name__}: {e}"
    api.disable()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
