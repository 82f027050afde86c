"""Records the trace of allocations for tests of the device memory pool: the allocations and frees of two real trainings.

A multilayer perceptron with Adam and a Llama of two layers with AdamW run on a device in another process. The trace is taken from
the frames that the client sends. The file is zlib-compressed little-endian int64, in order of time: n >= 0 allocates n bytes, -k
frees what was allocated k allocations ago. At the end, everything is freed. Which frees occur together depends on when the client
sends its frames.

Run: .venv/bin/python bench/record_allocations.py libs/testkit/src/wooly_testkit/data/training_trace.zz
"""

import struct
import sys
import zlib
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import nn
from wooly import api
from wooly.link import Link
from wooly_testkit.executor import executor_process
from wooly_wis.codec import decode_program, digest
from wooly_wis.frames import Kind, unpack_run

STEPS = 12


class Tape:
    """Allocations and frees, taken from the client's frames."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self._count = 0
        self._made: dict[int, int] = {}
        self._programs: dict[bytes, list[tuple[str, int, int]]] = {}

    def frame(self, kind: Kind, data: bytes) -> None:
        """Record one frame that the client sends."""
        if kind == Kind.DEFINE:
            self._programs[digest(data)] = list(self._changes(data))
        elif kind == Kind.RUN:
            run = unpack_run(data)
            for opcode, slot, nbytes in self._programs[run.digest]:
                self._alloc(run.bindings[slot], nbytes) if opcode == "alloc" else self._free(run.bindings[slot])
            for buffer in run.frees:
                self._free(buffer)

    @staticmethod
    def _changes(data: bytes) -> Iterator[tuple[str, int, int]]:
        program = decode_program(data)
        for instruction in program.body:
            form = program.forms[instruction.form]
            if form.opcode in ("alloc", "free"):
                view = form.operands[0].view
                nbytes = prod(view.sizes) * view.dtype.itemsize if form.opcode == "alloc" else 0
                yield form.opcode, instruction.slots[0], nbytes

    def _alloc(self, buffer: int, nbytes: int) -> None:
        self._made[buffer] = self._count
        self._count += 1
        self.events.append(nbytes)

    def _free(self, buffer: int) -> None:
        made = self._made.pop(buffer, None)  # results whose size only the device knows are not in the trace
        if made is not None:
            self.events.append(made - self._count)


def perceptron() -> None:
    """Adam on batches of random numbers, with a loss that is sometimes read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)).to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(STEPS):
        x, y = torch.randn(64, 784).to("cuda"), torch.randint(0, 10, (64,)).to("cuda")
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            loss.item()


def llama() -> None:
    """AdamW on batches of several lengths, with a loss that is read at each step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=8
    )
    model = LlamaForCausalLM(config).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        ids = torch.randint(0, 1000, (2, 24 + 8 * (step % 4))).to("cuda")
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


def main() -> None:
    """Record both trainings, and write the file."""
    torch.set_num_threads(1)
    tape = Tape()
    send = Link.send

    def recording(self: Link, kind: Kind, *buffers: bytes, **options: Any) -> int:
        if kind in (Kind.DEFINE, Kind.RUN):
            tape.frame(kind, b"".join(bytes(b) for b in buffers))
        return send(self, kind, *buffers, **options)

    Link.send = recording
    with executor_process() as running:
        api.attach(running.endpoints, running.session_id, running.token)
        api.install_facade()
        perceptron()
        llama()
        torch.cuda.synchronize()
        api.disable()
    data = zlib.compress(struct.pack(f"<{len(tape.events)}q", *tape.events), 9)
    with open(sys.argv[1], "wb") as file:
        file.write(data)
    print(f"{len(tape.events)} events, {sum(n >= 0 for n in tape.events)} allocations, {len(data)} bytes")


if __name__ == "__main__":
    main()
