"""Training steps of a Llama-shaped model on an executor with the tests' fake GPU: how much of a step is in graphs.

A step is a forward pass under autocast, a backward pass and AdamW, as in `bench/gpu.py`. Nothing here was measured on a GPU.
Which runs are equal for a graph depends on the addresses of tensors: here they are those of this machine's allocator.

Run: .venv/bin/python -m tests.costs.training [--steps N] [--dropout P] [--no-graphs] [--json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from wooly_executor.collector import Collector
from wooly_executor.device_loop import DeviceLoop
from wooly_executor.runtime.frame import Frame, Step
from wooly_executor.runtime.graphs import Graphs
from wooly_executor.runtime.prepared import PreparedProgram
from wooly_executor.runtime.replays import Captured
from wooly_executor.runtime.stretches import FREE_OF_WORK

from tests.costs.llama import HIDDEN, TOKENS, fake_gpu, layer, weights
from tests.costs.operations import GIB, attached

LAYERS, WORDS = 4, 64


class Counted:
    """Counts the library calls of programs that run hot, in graphs and outside of them."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._steps = Graphs.steps

    def install(self) -> None:
        """Count from now on, for all devices of this process."""
        steps, calls = self._steps, self.calls

        def counted(graphs: Graphs, prepared: PreparedProgram, frame: Frame, begin: int, of: Sequence[Step]) -> Any:
            end = begin + len(of)
            places = []
            for at, step in steps(graphs, prepared, frame, begin, of):
                places.append((at, "in graphs" if isinstance(step, Captured) else "outside"))
                yield at, step
            for (at, kind), (after, _) in zip(places, [*places[1:], (end, "")], strict=True):
                calls[kind] += _calls(prepared, at, after)

        Graphs.steps = counted  # type: ignore[method-assign]

    def remove(self) -> None:
        """Count no more."""
        Graphs.steps = self._steps  # type: ignore[method-assign]


def _calls(prepared: PreparedProgram, begin: int, end: int) -> int:
    """The number of steps that the hot steps from `begin` to `end` stand for, without those that launch nothing."""
    bounds = [*prepared.begins, len(prepared.steps)]
    return sum(not isinstance(prepared.traces[k], FREE_OF_WORK) for k in range(bounds[begin], bounds[end]))


def trainer(dropout: float) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Return a training step, which returns the loss, and the parameters. A client must be attached.

    `dropout`: probability of the dropout behind each layer.
    """
    torch.manual_seed(0)
    fixed = weights("cpu")
    shapes = {name: t.shape for name, t in fixed.items()}
    tables = {name: fixed[name].to("cuda", torch.float32) for name in ("cos", "sin")}

    def parameter(*shape: int) -> Tensor:
        return torch.nn.Parameter((torch.randn(*shape) / 8).to("cuda"))

    words = parameter(WORDS, HIDDEN)
    layers = [{k: parameter(*shape) for k, shape in shapes.items() if k not in tables} for _ in range(LAYERS)]
    parameters = [words, *[p for own in layers for p in own.values()]]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    tokens = (torch.arange(2 * TOKENS) * 29 % WORDS).view(2, TOKENS).to("cuda")

    def step() -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = functional.embedding(tokens, words)
            for own in layers:
                x = layer(x, own | tables)
                x = functional.dropout(x, dropout) if dropout else x
            logits = functional.linear(x, words)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, parameters


def train(
    steps: int, *, dropout: float = 0.0, graphs: bool = True, every: int = 20
) -> Iterator[tuple[int, Counter[str], list[Tensor]]]:
    """Train, and yield the number of steps so far, the library calls since the last time, and the parameters on the host."""
    counted = Counted()
    with attached(DeviceLoop(fake_gpu(graphs=graphs), memory=GIB, collector=Collector())):
        counted.install()
        try:
            step, parameters = trainer(dropout)
            for k in range(1, steps + 1):
                loss = step()
                if not k % 10:
                    loss.item()
                if not k % every:
                    torch.cuda.synchronize()
                    yield k, Counter(counted.calls), [p.detach().cpu() for p in parameters]
                    counted.calls.clear()
        finally:
            counted.remove()


def main() -> None:
    """Print the calls of a step in and outside of graphs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dropout", type=float, default=0.0, help="probability of a dropout behind each layer")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument(
        "--json", action="store_true", help="print the calls of the last steps, and a digest of the parameters"
    )
    options, every = parser.parse_args(), 20
    calls, parameters = Counter[str](), list[Tensor]()
    for k, calls, now in train(options.steps, dropout=options.dropout, graphs=not options.no_graphs, every=every):
        parameters = now
        if not options.json:
            print(
                f"step {k:4}: {calls['in graphs'] / every:6.1f} calls in graphs, {calls['outside'] / every:6.1f} outside"
            )
    if options.json:
        content = b"".join([p.numpy().tobytes() for p in parameters])
        print(json.dumps({"calls": calls, "parameters": hashlib.sha256(content).hexdigest()}))


if __name__ == "__main__":
    main()
