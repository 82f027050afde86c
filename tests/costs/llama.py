"""A forward pass of a Llama-shaped model on an executor: one program per layer, sent as an eager script sends it.

Its tensors are so small that the arithmetic costs nothing, so what is left is the cost of the executor's device thread. The GPU
is the tests' fake one, with the operators that the runtime chooses on an H100: nothing here was measured on a GPU.

Run: .venv/bin/python -m tests.costs.llama [--json]
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from wooly import api
from wooly.settings import Settings
from wooly_executor.runtime import gpu_attention, replays, stretches
from wooly_executor.runtime.gpu import GpuRuntime
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_wis.codec import decode_program, digest, encode_program
from wooly_wis.dtypes import DType
from wooly_wis.frames import Kind, pack_run
from wooly_wis.program import Form, Instruction, Operand, ParamKind, Program, Role, View
from wooly_wis.verifier import Verifier

from services.executor.tests.fake_gpu import FakeDriver, gpu_runtime
from tests.costs.counting import count
from tests.costs.operations import Device, client

#: Layers, tokens, hidden size, heads, key-value heads, size of the MLP.
LAYERS, TOKENS, HIDDEN, HEADS, KV_HEADS, MLP = 16, 12, 64, 4, 2, 128
WIDTH = HIDDEN // HEADS
#: Of a decode step: rows of the batch, and tokens of the cache.
ROWS, CACHED = 3, 24
#: Forward passes before the steady state: the steps are combined after 16 runs of the program, graphs captured after some more.
#: A multiple of the runs after which runs are sampled.
STEADY = 32


def weights(device: str, tokens: int = TOKENS) -> dict[str, Tensor]:
    """The weights of a layer, and the tables of its positions."""
    shapes = {
        "q": (HIDDEN, HIDDEN), "k": (KV_HEADS * WIDTH, HIDDEN), "v": (KV_HEADS * WIDTH, HIDDEN), "o": (HIDDEN, HIDDEN),
        "gate": (MLP, HIDDEN), "up": (MLP, HIDDEN), "down": (HIDDEN, MLP),
        "norm": (HIDDEN,), "norm2": (HIDDEN,), "cos": (1, tokens, WIDTH), "sin": (1, tokens, WIDTH),
    }  # fmt: skip
    return {name: torch.ones(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _rotated(t: Tensor) -> Tensor:
    return torch.cat((-t[..., WIDTH // 2 :], t[..., : WIDTH // 2]), dim=-1)


def layer(x: Tensor, w: dict[str, Tensor], cache: dict[str, Tensor] | None = None) -> Tensor:
    """A decoder layer as Hugging Face's Llama computes it.

    Args:
        x: (rows, tokens, HIDDEN).
        w: its weights.
        cache: keys and values of earlier tokens, the position of the new one, and the mask; None: there are no earlier tokens.
    """
    rows, tokens, _ = x.shape
    y = _norm(x, w["norm"])
    q, k, v = [
        functional.linear(y, w[name]).view(rows, tokens, heads, WIDTH).transpose(1, 2)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    ]
    cos, sin = w["cos"].unsqueeze(1), w["sin"].unsqueeze(1)
    q, k = q * cos + _rotated(q) * sin, k * cos + _rotated(k) * sin
    if cache is None:
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        k, v = [cache[name].index_copy_(2, cache["at"], t) for name, t in (("keys", k), ("values", v))]
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=cache["mask"], enable_gqa=True)
    x = x + functional.linear(mixed.transpose(1, 2).reshape(rows, tokens, HIDDEN), w["o"])
    y = _norm(x, w["norm2"])
    return x + functional.linear(
        functional.silu(functional.linear(y, w["gate"])) * functional.linear(y, w["up"]), w["down"]
    )


def layers_of_client() -> Callable[[], Any]:
    """A prompt on the client's device, eager: all layers, and the programs that are sent for them. A client must be attached."""
    w = {name: t.requires_grad_() for name, t in weights("cuda").items()}  # as parameters
    x = torch.ones(1, TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    recorder = api._attached.device.devices.recorders[0]
    recorder.set_limit(Settings().flush_instructions)

    def work() -> None:
        held = x
        with torch.no_grad():
            for _ in range(LAYERS):
                held = layer(held, w)
        recorder.flush()

    for _ in range(16):
        work()
        torch.cuda.synchronize()
    return work


def recorded_layer(folder: Path, *, decoding: bool = False) -> bytes:
    """The definition of the program of a layer. A client must be attached.

    `decoding`: a step of decoding with a cache of fixed size, in place of a prompt.
    """
    w, cache = weights("cuda", 1 if decoding else TOKENS), None
    x = torch.ones(ROWS if decoding else 1, 1 if decoding else TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    if decoding:
        shape = ROWS, KV_HEADS, CACHED, WIDTH
        cache = {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name in ("keys", "values")}
        cache |= {"at": torch.zeros(1, dtype=torch.long, device="cuda")}
        cache |= {"mask": torch.ones(ROWS, 1, 1, CACHED, dtype=torch.bool, device="cuda")}
    recorder = api._attached.device.devices.recorders[0]
    recorder.flush()
    found = folder / ("step" if decoding else "layer")
    found.mkdir()
    recorder.programs_dir = found
    with torch.no_grad():
        y = layer(x, w, cache)
    recorder.flush()
    recorder.programs_dir = None
    assert x.shape == y.shape  # both are alive until here, so the program does not free them
    (path,) = found.iterdir()
    return path.read_bytes()


def calls_of(raw: bytes) -> int:
    """The number of instructions of a program that compute."""
    program = decode_program(raw)
    return sum(program.forms[i.form].opcode not in ("alloc", "free") for i in program.body)


class Forward:
    """Forward passes on a device: each layer is one run of the same program, on weights of its own.

    As in an eager script, the output of a layer is the input of the next one, and is freed by the run after.
    """

    def __init__(self, device: Device, raw: bytes) -> None:
        self.device = device
        program = decode_program(raw)
        facts = Verifier().verify(program)
        self._name, self._session = digest(raw), device.loop.sessions.all()[0]
        kinds = program.param_kinds
        self._params = struct.pack(
            "<" + "".join(["d" if k is ParamKind.F64 else "q" for k in kinds]), *[1 for _ in kinds]
        )
        slots = range(len(facts.slot_bytes))
        given = [s for s in slots if facts.slot_alloc[s] is None]
        (self._output,) = [s for s in slots if facts.slot_alloc[s] is not None and not facts.slot_freed[s]]
        (self._input,) = [s for s in given if facts.slot_bytes[s] == facts.slot_bytes[self._output]]
        self._slots, self._next = len(slots), 1 << 20
        self._programs = self._session.counters.programs
        device.channel.send(Kind.DEFINE, raw)
        first = self._made(facts.slot_bytes[self._input])
        self._weights = [{s: self._made(facts.slot_bytes[s]) for s in given if s != self._input} for _ in range(LAYERS)]
        self._hidden = [first, *[self._new() for _ in range(LAYERS)]]
        self._old = 0
        for _ in range(STEADY):
            self.send()
            self.run()
            device.settle()

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _made(self, nbytes: int) -> int:
        """Allocate a buffer. Returns its id."""
        form = Form("alloc", (Operand(Role.OUT, View(DType.U8, (nbytes,), (1,), 0)),))
        raw = encode_program(Program((form,), (Instruction(0, (0,)),)))
        buffer = self._new()
        self.device.channel.send(Kind.DEFINE, raw)
        self.device.channel.send(Kind.RUN, pack_run(digest(raw), [buffer], b"", []))
        self._finish(1)
        return buffer

    def send(self) -> None:
        """Send one forward pass."""
        send = self.device.channel.send
        for k in range(LAYERS):
            bound = self._weights[k] | {self._input: self._hidden[k], self._output: self._hidden[k + 1]}
            bindings = [bound[s] if s in bound else self._new() for s in range(self._slots)]
            send(Kind.RUN, pack_run(self._name, bindings, self._params, [self._old] if self._old else []))
            self._old = self._hidden[k + 1]

    def run(self) -> None:
        """Run the forward pass that was sent."""
        self._finish(LAYERS)

    def _finish(self, programs: int) -> None:
        """Do turns of the loop until so many more programs have run."""
        self._programs += programs
        while self._session.counters.programs < self._programs:
            self.device.turn()
            assert self._session.failure is None, self._session.failure


class _UnwatchedDriver(FakeDriver):
    """A fake GPU that does not look for accesses without an order."""

    def attach(self) -> None:
        self.torch_cuda.set_stream(self.stream)

    @contextmanager
    def copy_context(self) -> Iterator[None]:
        with super(FakeDriver, self).copy_context():
            yield


class _Operators:
    """The fused attention of an H100's library, computed by the CPU's."""

    class _fused_sdp_choice:
        @staticmethod
        def default(*args: Any, **kwargs: Any) -> int:
            return gpu_attention.CUDNN_CHOSEN

    class _scaled_dot_product_cudnn_attention:
        @staticmethod
        def default(
            q: Tensor, k: Tensor, v: Tensor, bias: None, logs: bool, p: float, causal: bool, mask: bool, scale: float
        ) -> tuple[Tensor, Tensor]:
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, p, causal, scale=scale)
            return found[0], found[1].unsqueeze(-1)

    class _scaled_dot_product_cudnn_attention_backward:
        @staticmethod
        def default(*args: Any, scale: float) -> tuple[Tensor, ...]:
            g, q, k, v, out, logs, _, _, _, _, _, _, _, p, causal = args
            heads = q.shape[1] // k.shape[1]
            wide = [t.unsqueeze(2).expand(-1, -1, heads, -1, -1).reshape(q.shape) for t in (k, v)]
            by_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            found = by_cpu(g, q, *wide, out, logs.squeeze(-1), p, causal, scale=scale)
            return found[0], *[t.unflatten(1, (-1, heads)).sum(2) for t in found[1:]]

    class _scaled_dot_product_efficient_attention:
        @staticmethod
        def default(
            q: Tensor, k: Tensor, v: Tensor, bias: Tensor, logs: bool, p: float, causal: bool, scale: float
        ) -> tuple[Tensor, ...]:
            by_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
            found = by_cpu(q, k, v, p, causal, attn_mask=bias, scale=scale)
            return found[0], found[1], q, q


def fake_gpu(*, graphs: bool) -> GpuRuntime:
    """The GPU runtime on a fake GPU, whose library is the CPU's, with the operators that it would choose on an H100."""
    gpu_attention._chip = lambda device: gpu_attention.Chip("nvidia", 9, 0)  # type: ignore[assignment]
    gpu_attention.aten = _Operators
    # as a model whose weights and hidden states are large tensors: only norms and positions are small ones
    stretches.SMALL, replays.COPIED, stretches.COPIED = 600, 1024, 1024
    found = gpu_runtime(_UnwatchedDriver())
    found.profiles = False
    if not graphs:
        found.leave_out_graphs()
    return found


def forward(folder: Path, raw: bytes, runtime: Any) -> Forward:
    """Forward passes on a device with this runtime, in their steady state."""
    place = Path(tempfile.mkdtemp(dir=folder))  # each device has a socket of its own
    return Forward(Device(place, {}, runtime), raw)


def counted(passes: Forward) -> Counter[str]:
    """The bytecode instructions of a forward pass in the device's thread, by function."""
    return count(passes.run, before=passes.send)


def cpu_ns(passes: Forward, repeat: int = 101) -> int:
    """The least CPU time of a forward pass in the device's thread, in ns."""
    found = []
    for _ in range(repeat):
        passes.send()
        begun = time.thread_time_ns()
        passes.run()
        found.append(time.thread_time_ns() - begun)
    return min(found)


# -- the table -------------------------------------------------------------------------------------------------------

#: What the instructions are spent on, by beginnings of module names; the first one that fits counts.
GROUPS = {
    "frames: reading, decoding": ("wooly_bus", "wooly_wis", "wooly_executor.intake", "wooly_executor.frames"),
    "fold: order and answers of a session": (
        *("wooly_executor.flow", "wooly_executor.interpreter", "wooly_executor.processing", "wooly_executor.answers"),
        *("wooly_executor.post", "wooly_executor.session:", "wooly_executor.device_loop"),
    ),
    "dispatch: decisions and launches": (
        *("wooly_dispatch", "wooly_executor.dispatch", "wooly_executor.launching", "dataclasses"),
    ),
    "bills: times, prices, usage": (
        *("wooly_executor.billing", "wooly_executor.counters", "wooly_executor.estimates"),
        *("wooly_executor.runtime.core_use", "wooly_executor.collector"),
    ),
    "memory: bindings, accounts": (
        *("wooly_executor.memory", "wooly_executor.vram", "wooly_executor.runs", "wooly_executor.session_programs"),
        *("wooly_executor.programs", "wooly_executor.plans.tiers", "wooly_executor.runtime.bindings: BindingCheck"),
    ),
    "flights: marks and times of a GPU": (
        *("wooly_executor.runtime.gpu:", "wooly_executor.runtime.flights", "wooly_executor.runtime.torch_gpu"),
    ),
    "steps: registers, library calls, replays": ("wooly_executor.runtime",),
}


def grouped(functions: Counter[str]) -> dict[str, int]:
    """Return the instructions of each group of `GROUPS`."""
    found = dict.fromkeys([*GROUPS, "other"], 0)
    for name, instructions in functions.items():
        group = next((g for g, begins in GROUPS.items() if name.startswith(begins)), "other")
        found[group] += instructions
    return found


def eager_ns() -> int:
    """CPU time of a forward pass in plain PyTorch, in ns."""
    own, x, found = [weights("cpu") for _ in range(LAYERS)], torch.ones(1, TOKENS, HIDDEN, dtype=torch.bfloat16), []
    with torch.inference_mode():
        for _ in range(41):
            begun, held = time.thread_time_ns(), x
            for w in own:
                held = layer(held, w)
            found.append(time.thread_time_ns() - begun)
    return min(found)


def finding_ns(passes: Forward, runtime: GpuRuntime) -> int:
    """CPU time until the graph of a program is found, in ns."""
    found: list[int] = []
    steps = runtime.graphs.steps

    def timed(*given: Any) -> Any:
        begun = time.perf_counter_ns()
        todo = steps(*given)
        found.append(time.perf_counter_ns() - begun)
        return todo

    runtime.graphs.steps = timed  # type: ignore[method-assign]
    for _ in range(20):
        passes.send()
        passes.run()
    runtime.graphs.steps = steps  # type: ignore[method-assign]
    return min(found)


def measured(folder: Path) -> dict[str, Any]:
    """Measure all ways to run the forward pass."""
    torch.set_num_threads(1)
    with client():
        prompt, step = recorded_layer(folder), recorded_layer(folder, decoding=True)
    calls = calls_of(prompt) * LAYERS
    ways: dict[str, tuple[Any, bytes]] = {
        "CPU": (TorchCpuRuntime(), prompt),
        "fake GPU": (fake_gpu(graphs=False), prompt),
        "with graphs": (fake_gpu(graphs=True), prompt),
        "decode": (fake_gpu(graphs=False), step),
        "decode, graphs": (fake_gpu(graphs=True), step),
    }
    found: dict[str, Any] = {"calls": calls, "programs": LAYERS, "eager us per call": eager_ns() / 1e3 / calls}
    for name, (runtime, raw) in ways.items():
        calls = calls_of(raw) * LAYERS
        passes = forward(folder, raw, runtime)
        functions = counted(passes)
        of = found[name] = {"library calls": calls, "instructions per call": functions.total() / calls}
        of |= {group: n / LAYERS for group, n in grouped(functions).items()}
        of["us per call"] = cpu_ns(passes) / 1e3 / calls
        if isinstance(runtime, GpuRuntime):
            of["replays per program"] = replays_per_program(passes, runtime)
            of["us to find a graph"] = finding_ns(passes, runtime) / 1e3 if of["replays per program"] else 0.0
        passes.device.close()
    return found


def replays_per_program(passes: Forward, runtime: GpuRuntime) -> float:
    """The number of replays per program of a pass, with graphs."""
    before = runtime.graphs.replayed
    passes.send()
    passes.run()
    return (runtime.graphs.replayed - before) / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wooly-costs-") as name:
        found = measured(Path(name))
    if args.json:
        print(json.dumps(found))
        return
    ways = [name for name, of in found.items() if isinstance(of, dict)]
    print(
        f"{found['programs']} programs, {found['calls']} library calls; eager {found['eager us per call']:.2f} us per call"
    )
    print(f"{'':44}" + "".join([f"{name:>16}" for name in ways]))
    for figure in dict.fromkeys([figure for name in ways for figure in found[name]]):
        values = [found[name].get(figure) for name in ways]
        print(f"{figure:44}" + "".join([f"{'' if value is None else f'{value:,.1f}':>18}" for value in values]))


if __name__ == "__main__":
    main()
