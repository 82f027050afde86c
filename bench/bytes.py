"""Measures how fast large tensors go to the device and come back: uploads, downloads, pinned memory, and the loading of a model.

Over the unix socket, the baselines are copies in this process's memory, and loading the model here. Over TCP, the baseline is a
pair of plain sockets in two processes. Each measurement alternates with its baseline; figures are medians, and quartiles in
brackets.

    python bench/bytes.py [--only memory|tcp|model] [--json] [--repeat 9]
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from figures import row, show
from wooly import api
from wooly_testkit.executor import executor_process

NBYTES = 256 << 20
PIECE = 4 << 20


def measure(functions, repeat):
    """Run functions in turn. Each returns its time in seconds, or None to be timed as a whole. Returns the times per function."""
    found = [[] for _ in functions]
    for n in range(repeat + 1):
        for function, times in zip(functions, found, strict=True):
            started = time.perf_counter()
            took = function()
            if n:  # the first round warms up
                times.append(time.perf_counter() - started if took is None else took)
    return found


def rate_row(name, times, base, goal, nbytes=NBYTES):
    """A row in GB/s."""
    rates = sorted([nbytes / 1e9 / t for t in times])
    least, _, most = statistics.quantiles(rates, n=4)
    return row(
        name, "GB/s", statistics.median(rates), nbytes / 1e9 / statistics.median(base), goal, higher_is_better=True,
        spread=[round(least, 2), round(most, 2)],
    )  # fmt: skip


def transfers():
    """Functions that copy `NBYTES`: to the device, from it, the same with pinned memory, and into new memory of this process."""
    host = torch.randn(NBYTES // 4)
    there, back = torch.empty(NBYTES // 4, device="cuda"), torch.zeros(NBYTES // 4)
    pinned, pinned_back = host.pin_memory(), back.pin_memory()

    def up(source):
        there.copy_(source)
        torch.cuda.synchronize()

    def down(target):
        there.mul_(1)
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(there)
        return time.perf_counter() - started

    def fresh():
        started = time.perf_counter()
        made = there.cpu()
        took = time.perf_counter() - started
        del made
        return took

    def copy():
        back.copy_(host)

    def clone():
        host.clone()

    def check():
        for target in (back, pinned_back):
            target.zero_()
            down(target)
            assert torch.equal(target, host), "the bytes differ"

    return {
        "upload": lambda: up(host),
        "download": lambda: down(back),
        "pinned upload": lambda: up(pinned),
        "pinned download": lambda: down(pinned_back),
        ".cpu()": fresh,
        "copy": copy,
        "clone": clone,
        "check": check,
    }


def bench_memory(running, repeat):
    """256 MiB over the unix socket. The baselines are a copy, and a copy into new memory."""
    api.attach(running.endpoints[:1], running.session_id, running.token)
    api.install_facade()
    functions = transfers()
    check = functions.pop("check")
    found = dict(zip(functions, measure(list(functions.values()), repeat), strict=True))
    check()
    api.disable()
    for name in ("upload", "download", "pinned upload", "pinned download"):
        yield rate_row(f"{name}, same host", found[name], found["copy"], 0.8)
    yield rate_row(".cpu(), same host", found[".cpu()"], found["clone"], 0.8)


def plain_end(port):
    """The other end of the plain sockets: receives `NBYTES` after "u", and sends them after "d"."""
    memory = memoryview(bytearray(NBYTES))
    sock = socket.create_connection(("127.0.0.1", port))
    enlarge(sock)
    while order := sock.recv(1):
        if order == b"u":
            receive(sock, memory)
            sock.sendall(b"k")
        else:
            sock.sendall(memory)


def enlarge(sock):
    """Give a socket the buffers that the data channel has."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def free_port():
    """A port that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def receive(sock, memory):
    """Fill memory from a socket."""
    at = 0
    while at < len(memory):
        at += sock.recv_into(memory[at : at + PIECE])


def bench_tcp(running, repeat):
    """256 MiB over TCP on the loopback interface. The baseline is a pair of plain sockets."""
    listener = socket.create_server(("127.0.0.1", 0))
    far = multiprocessing.get_context("fork").Process(target=plain_end, args=(listener.getsockname()[1],), daemon=True)
    far.start()
    sock, _ = listener.accept()
    enlarge(sock)
    memory = memoryview(bytearray(NBYTES))

    def plain_up():
        sock.sendall(b"u")
        sock.sendall(memory)
        sock.recv(1)

    def plain_down():
        sock.sendall(b"d")
        receive(sock, memory)

    api.attach(running.endpoints[1:], running.session_id + "-tcp", running.token)
    api.install_facade()
    functions = transfers()
    check = functions.pop("check")
    ours = [functions[name] for name in ("upload", "download")]
    up, base_up, down, base_down = measure([ours[0], plain_up, ours[1], plain_down], repeat)
    check()
    api.disable()
    sock.close(), listener.close()
    far.join()
    yield rate_row("upload, TCP, against plain sockets", up, base_up, 0.9)
    yield rate_row("download, TCP, against plain sockets", down, base_down, 0.9)


def bench_model(running, repeat):
    """`from_pretrained` of 1 GiB of safetensors. The baseline loads the model here and copies each parameter once."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=2048, intermediate_size=5504, num_hidden_layers=4, num_attention_heads=16,
        tie_word_embeddings=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="wooly-model-") as folder, torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
        with torch.device("cpu"):
            save_file(
                {name: torch.rand(shape) for name, shape in shapes.items()},
                Path(folder) / "model.safetensors",
                {"format": "pt"},
            )
        config.save_pretrained(folder)
        nbytes = sum([4 * shape.numel() for shape in shapes.values()])
        api.attach(running.endpoints[:1], running.session_id + "-model", running.token)
        api.install_facade()

        def ours():
            with torch.device("cpu"):
                model = LlamaForCausalLM.from_pretrained(folder, device_map="cuda", dtype=torch.float32)
            torch.cuda.synchronize()
            loaded.append(model)

        def local():
            with torch.device("cpu"):
                model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
            for p in model.parameters():
                p.data = p.data.clone()
            loaded.append(model)

        def drop():
            loaded.clear()
            torch.cuda.synchronize()

        loaded = []
        there, _, here, _ = measure([ours, drop, local, drop], repeat)
        api.disable()
    least, _, most = statistics.quantiles(there, n=4)
    yield row(
        f"from_pretrained, {nbytes / (1 << 30):.2f} GiB", "s", statistics.median(there), statistics.median(here), 1.3,
        spread=[round(least, 3), round(most, 3)],
    )  # fmt: skip


BENCHES = {"memory": bench_memory, "tcp": bench_tcp, "model": bench_model}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--only", choices=BENCHES)
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    environment = {"WOOLY_EXECUTOR_SHARED_MEMORY": str(1 << 30)}  # the pinned tensors need half of it
    with executor_process(port=free_port(), environment=environment) as running:
        for name, bench in BENCHES.items():
            if args.only in (None, name):
                rows += bench(running, args.repeat)
    show(rows, args.json, baseline="baseline")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
