"""Foreign kernels on the executor's CUDA runtime: each compared with a direct launch, and with torch.

Triton launches one of its kernels in the usual way; the executor then gets the text that Triton compiled. The modules of
`services/compiler/tests/kernels` must be on the path.
"""

import statistics
import threading
from itertools import pairwise

import torch
from wooly_executor.programs import Author, ProgramStore
from wooly_executor.runtime.buffers import WIS_DTYPE, Buffer
from wooly_wis.codec import digest, encode_program
from wooly_wis.dtypes import DType
from wooly_wis.foreign import UNCHECKED, Launch, Source, encode_source
from wooly_wis.program import Form, Instruction, Operand, Program, Role, View

SCALARS = {
    "i1": DType.BOOL,
    **{f"{s}{n}": getattr(DType, f"{s}{n}".upper()) for s in "iu" for n in (8, 16, 32, 64)},
    "fp16": DType.F16,
    "bf16": DType.BF16,
    "fp32": DType.F32,
    "fp64": DType.F64,
}
ENDLESS = """module {
  tt.func public @spin(%x: !tt.ptr<f32>) attributes {noinline = false} {
    %zero = arith.constant 0.0 : f32
    scf.while : () -> () {
      %v = tt.load %x {isVolatile = true} : !tt.ptr<f32>
      %c = arith.cmpf oeq, %v, %zero : f32
      scf.condition(%c)
    } do {
      scf.yield
    }
    tt.return
  }
}
"""
C_SCALARS = {int: DType.I64, float: DType.F64, bool: DType.BOOL}


class Kernel:
    """One launch: the executor's inputs, and a direct launch."""

    def __init__(self, source, entry, grid, block, given, options, direct, wanted, near=(1e-5, 1e-6), clear=()):
        self.source, self.entry, self.grid, self.block = source, entry, grid, block
        #: Arguments: tensors, and (dtype, number).
        self.given, self.options = given, options
        self.direct, self.wanted, self.near = direct, wanted, near
        #: Tensors that are set to 0 before a launch.
        self.clear = [*clear, *[out for out, _ in wanted]]

    def program(self, *, unchecked, windows):
        """The program of one launch, its sources, and the tensors that its slots are bound to.

        `windows`: by argument number, (elements, first) of the part of a tensor that the launch gets.
        """
        raw = encode_source(self.source)
        tensors = [g for g in self.given if isinstance(g, torch.Tensor)]
        names = iter(range(len(tensors)))
        args = tuple([next(names) if isinstance(g, torch.Tensor) else g for g in self.given])
        options = tuple(sorted({**self.options, **({UNCHECKED: True} if unchecked else {})}.items()))
        launch = Launch(self.source.language, digest(raw), self.entry, self.grid, self.block, args, options)
        operands = []
        for k, t in enumerate(tensors):
            dtype = DType.U8 if self.source.language == "cuda-c" else WIS_DTYPE[t.dtype]
            n, first = windows.get(k, (t.nbytes // dtype.itemsize, 0))
            operands.append(Operand(Role.INOUT, View(dtype, (n,), (1,), first * dtype.itemsize)))
        form = Form("kernel.launch", tuple(operands), (), launch.attrs())
        return Program((form,), (Instruction(0, tuple(range(len(tensors)))),)), {digest(raw): self.source}, tensors


def triton_kernel(jit, grid, values, constants, wanted, near=(1e-5, 1e-6), num_warps=4, clear=()):
    """A launch of a Triton kernel."""

    def direct():
        return jit[grid](*values, **constants, num_warps=num_warps)

    compiled = direct()
    torch.cuda.synchronize()
    named = dict(zip(jit.arg_names, values, strict=False)) | constants
    given = []
    for name, kind in compiled.src.signature.items():
        value = named[name if isinstance(name, str) else jit.arg_names[name]]
        if kind == "constexpr":
            continue
        given.append(value if kind.startswith("*") else (SCALARS[kind], value))
    text = compiled.asm["ttir"]
    source = Source("ttir", text.decode() if isinstance(text, bytes) else text)
    three = (*grid, 1, 1, 1)[:3]
    options = {"num_warps": num_warps, "num_stages": compiled.metadata.num_stages}
    return Kernel(source, compiled.metadata.name, three, (1, 1, 1), given, options, direct, wanted, near, clear)


def c_kernel(text, entry, grid, block, values, wanted, near=(0, 0), shared=0):
    """A launch of a kernel in CUDA C."""
    make = getattr(torch.cuda, "_compile_kernel", None)
    direct = None
    if make is not None and torch.cuda.is_available():
        kernel = make(text, entry)
        direct = lambda: kernel(grid=grid, block=block, args=values, shared_mem=shared)  # noqa: E731
    given = [v if isinstance(v, torch.Tensor) else (C_SCALARS[type(v)], v) for v in values]
    options = {"shared": shared} if shared else {}
    return Kernel(Source("cuda-c", text), entry, grid, block, given, options, direct, wanted, near)


def kernels(device):
    """The kernels by name, each with the function that makes its launch."""
    import cuda_kernels
    import triton_kernels as t
    from triton import cdiv

    def randn(*sizes, dtype=torch.float32):
        return torch.randn(*sizes, device=device, dtype=dtype)

    def add():
        x, y = randn(1 << 24), randn(1 << 24)
        out = torch.empty_like(x)
        return triton_kernel(
            t.add_kernel, (cdiv(1 << 24, 1024),), (x, y, out, 1 << 24), {"BLOCK": 1024}, [(out, lambda: x + y)]
        )

    def softmax():
        x = randn(4096, 4096)
        out = torch.empty_like(x)
        return triton_kernel(
            t.softmax_kernel, (4096,), (out, x, 4096, 4096), {"BLOCK": 4096}, [(out, lambda: x.softmax(1))], num_warps=8
        )

    def matmul(dtype=torch.float16, n=2048):
        a, b = randn(n, n, dtype=dtype), randn(n, n, dtype=dtype)
        c = torch.empty_like(a)
        values = (a, b, c, n, n, n, n, 1, n, 1, n, 1)
        constants = {"BM": 128, "BN": 128, "BK": 32, "EVEN": True}
        jit = t.matmul_kernel.fn.fn
        grid = (cdiv(n, 128) ** 2,)
        return triton_kernel(jit, grid, values, constants, [(c, lambda: a @ b)], near=(1e-2, 1e-1), num_warps=8)

    def layer_norm():
        x, w, b = randn(8192, 1024), randn(1024), randn(1024)
        y, mean, rstd = torch.empty_like(x), randn(8192), randn(8192)
        values = (x, w, b, y, mean, rstd, 1024, 1024, 1e-5)
        wanted = [(y, lambda: torch.nn.functional.layer_norm(x, (1024,), w, b))]
        return triton_kernel(t.layer_norm_forward, (8192,), values, {"BLOCK": 1024}, wanted, near=(1e-4, 1e-4))

    def layer_norm_gradient():
        rows, n, groups = 512, 1024, 64
        x, dy, w = randn(rows, n), randn(rows, n), randn(n)
        mean = x.mean(1)
        rstd = (x.var(1, correction=0) + 1e-5).rsqrt()
        dx, dw, db = torch.empty_like(x), torch.zeros(groups, n, device=device), torch.zeros(groups, n, device=device)
        locks = torch.zeros(2 * groups, dtype=torch.int32, device=device)

        def wanted():
            with torch.inference_mode(False), torch.enable_grad():
                given = x.clone().requires_grad_()
                torch.nn.functional.layer_norm(given, (n,), w.clone(), None, 1e-5).backward(dy.clone())
            return given.grad

        values = (dx, dy, dw, db, x, w, mean, rstd, locks, n, n)
        constants, near = {"GROUPS": groups, "BLOCK": 1024}, (1e-3, 1e-3)
        jit, clear = t.layer_norm_backward, (locks, dw, db)
        return triton_kernel(jit, (rows,), values, constants, [(dx, wanted)], near, clear=clear)

    def dropout():
        x = randn(1 << 22)
        out = torch.empty_like(x)
        values = (x, out, 1 << 22, 0.5, 7)
        # Triton's random numbers decide which elements are kept; the kept ones are doubled
        wanted = [(out, lambda: torch.where(out != 0, 2 * x, 0.0))]
        return triton_kernel(t.dropout_kernel, (cdiv(1 << 22, 512),), values, {"BLOCK": 512}, wanted)

    def attention():
        q, k, v = (randn(4, 16, 1024, 64, dtype=torch.float16) for _ in range(3))
        out = torch.empty_like(q)
        values = (q, k, v, out, 64**-0.5 * 1.4426950408889634, q.stride(1), q.stride(2), 1024)
        constants = {"D": 64, "BM": 64, "BN": 64, "CAUSAL": True}
        wanted = [(out, lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))]
        return triton_kernel(t.attention_kernel, (16, 64), values, constants, wanted, near=(2e-2, 2e-2))

    def grouped_gemm():
        a, b = randn(1024, 256, dtype=torch.float16), randn(4, 256, 512, dtype=torch.float16)
        offsets = torch.tensor([0, 100, 400, 401, 1024], dtype=torch.int32, device=device)
        c = torch.empty(1024, 512, device=device)

        def wanted():
            ends = offsets.tolist()
            return torch.cat([a[i:j].float() @ b[g].float() for g, (i, j) in enumerate(pairwise(ends))])

        values = (a, b, c, offsets, 4, 512, 256)
        constants = {"BM": 64, "BN": 64, "BK": 32}
        return triton_kernel(t.grouped_gemm_kernel, (64,), values, constants, [(c, wanted)], near=(1e-2, 1e-1))

    def histogram():
        x = torch.randint(0, 64, (1 << 22,), dtype=torch.int32, device=device)
        bins = torch.zeros(64, dtype=torch.int32, device=device)
        text = cuda_kernels.HISTOGRAM.replace("__global__", 'extern "C" __global__')
        return c_kernel(
            text, "histogram", (256, 1, 1), (256, 1, 1), [x, bins, 1 << 22], [(bins, lambda: torch.bincount(x).int())]
        )

    def reduction():
        x = randn(1 << 22)
        out = torch.empty(256, device=device)
        text = cuda_kernels.REDUCE.replace("__global__", 'extern "C" __global__')
        wanted = [(out, lambda: x.view(-1, 256, 256).sum((0, 2)))]  # blocks take turns of 256 elements
        values = [x, out, 1 << 22]
        return c_kernel(text, "reduce", (256, 1, 1), (256, 1, 1), values, wanted, near=(1e-3, 1e-2), shared=1024)

    return {
        "vector add, 16M": add,
        "softmax 4096x4096": softmax,
        "matmul f16 2048": matmul,
        "layer norm 8192x1024": layer_norm,
        "its gradient, 512 rows": layer_norm_gradient,
        "dropout, 4M": dropout,
        "attention, 64 heads": attention,
        "grouped gemm": grouped_gemm,
        "histogram, CUDA C": histogram,
        "reduction, CUDA C": reduction,
    }


def prepared(gpu, kernel, *, unchecked=False, windows=None):
    """Compile a kernel for the runtime. Returns the prepared program and its buffers."""
    program, sources, tensors = kernel.program(unchecked=unchecked, windows=windows or {})
    ready = ProgramStore(gpu.runtime).define(encode_program(program), sources, Author("", opaque=True))
    for made in ready.kernels:
        done = threading.Event()
        if made.then(done.set):
            assert done.wait(300), "the kernel was not compiled within 300 s"
    buffers = {k: Buffer(t.nbytes, t.view(-1).view(torch.uint8)) for k, t in enumerate(tensors)}
    return ready.prepared, buffers, tensors


def check(gpu, names=()):
    """Run every kernel once and check its results. Returns the failures."""
    failed = []
    for name, make in kernels(gpu.device).items():
        if names and name not in names:
            continue
        try:
            kernel = make()
            ran, buffers, _ = prepared(gpu, kernel)
            for t in kernel.clear:
                t.zero_()
            gpu.run(ran, buffers)
            for out, wanted in kernel.wanted:
                expected = wanted()
                torch.testing.assert_close(out, expected.to(out.dtype), rtol=kernel.near[0], atol=kernel.near[1])
            print(f"  {name}: right", flush=True)
        except Exception as e:
            print(f"  {name}: WRONG: {type(e).__name__}: {str(e)[:1500]}", flush=True)
            failed.append(name)
    return failed


def speed(gpu, device_ns, settle, timed):
    """Rows: kernel, time with guards, without guards, and of a direct launch, in us."""
    rows = []
    print(f"  {'':24} {'ours us':>9} {'unchecked':>9} {'direct us':>9} {'x direct':>8}")
    for name, make in kernels(gpu.device).items():
        try:
            kernel = make()
            times = {}
            for unchecked in (False, True):
                if unchecked and kernel.source.language != "ttir":
                    times[unchecked] = float("nan")
                    continue
                ran, buffers, _ = prepared(gpu, kernel, unchecked=unchecked)
                found = [gpu.run(ran, buffers) for _ in range(settle + timed)]
                times[unchecked] = statistics.median(found[settle:]) / 1e3
            direct = device_ns(kernel.direct) / 1e3 if kernel.direct is not None else float("nan")
        except Exception as e:
            print(f"  {name}: failed: {type(e).__name__}: {str(e)[:500]}")
            rows.append({"name": f"kernel: {name}", "error": str(e)[:2000]})
            continue
        rows.append(
            {
                "name": f"kernel: {name}",
                "ours_us": times[False],
                "unchecked_us": times[True],
                "direct_us": direct,
            }
        )
        print(f"  {name:24} {times[False]:9.1f} {times[True]:9.1f} {direct:9.1f} {direct / times[False]:8.2f}")
    return rows


def walls(gpu):
    """Forbidden accesses of a kernel fail its launch only; the device continues."""
    import triton_kernels as t

    n = 1 << 12
    x, memory = torch.ones(16 * 1024, device=gpu.device), torch.zeros(16 * 1024, device=gpu.device)
    kernel = triton_kernel(t.add_kernel, (16,), (x, x, memory, 16 * 1024), {"BLOCK": 1024}, [])
    memory.zero_()
    ran, buffers, _ = prepared(gpu, kernel, windows={2: (n, n)})  # only the second quarter
    try:
        gpu.run(ran, buffers)
    except AssertionError as e:
        assert "beyond the buffer that the launch was given" in str(e), e
    else:
        raise AssertionError("stores out of bounds raised no error")
    assert not memory[:n].any() and not memory[2 * n :].any(), "memory that the launch was not given was written"
    assert torch.equal(memory[n : 2 * n], torch.full((n,), 2.0, device=gpu.device))


def time_limit(gpu):
    """An endless loop is stopped, and the device continues."""
    kernel = Kernel(
        Source("ttir", ENDLESS), "spin", (1, 1, 1), (1, 1, 1), [torch.zeros(4, device=gpu.device)], {}, None, []
    )
    ran, buffers, _ = prepared(gpu, kernel)
    limit, gpu.runtime.kernel_s = gpu.runtime.kernel_s, 1.0
    try:
        gpu.run(ran, buffers)
    except AssertionError as e:
        assert "kernel spin on a grid of 1, 1, 1: stopped because it took more than 1 s" in str(e), e
    else:
        raise AssertionError("the endless loop ended by itself")
    finally:
        gpu.runtime.kernel_s = limit
    assert torch.ones(2, device=gpu.device).sum().item() == 2
