# ruff: noqa: E501 (sources in one line)
"""CUDA C: rejected sources and their messages, hostile kernels (which must not harm the device), and arithmetic."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from wooly_cuda_c.page import page
from wooly_cuda_c.printing.dialects import CUDA, DIALECTS
from wooly_cuda_c.printing.translate import translate
from wooly_cuda_c.syntax.errors import CudaSourceError
from wooly_cuda_c.syntax.parser import parse

ONE = (1, 1, 1)


def lowered(body, params="float* a, int n", block=ONE, before="", **more):
    arguments = ["buffer" if "*" in p else "i64" for p in params.split(",") if p]
    return translate(f"{before}\n__global__ void f({params}) {{\n{body}\n}}", "f", arguments, block, **more)


REFUSED = {
    "inline assembly": ('asm("trap;");', "line 3: asm: inline assembly cannot be checked"),
    "more inline assembly": ('int x; asm volatile("mov.u32 %0, 1;" : "=r"(x));', "line 3: asm: inline assembly"),
    "goto": ("again: goto again;", "line 3: "),
    "printing": ('printf("%d", n);', "line 3: printf: a kernel cannot print"),
    "heap": ("float* p = new float[4];", "line 3: new: a kernel has no heap"),
    "malloc": ("float* p = (float*)malloc(4);", "line 3: malloc: a kernel has no heap"),
    "number to pointer": ("float* p = (float*)(size_t)n; *p = 1;", "line 3: .* cannot be cast to a pointer"),
    "number to pointer by another name": (
        "float* p = reinterpret_cast<float*>(n); *p = 1;",
        "line 3: .* cannot be cast to a pointer",
    ),
    "pointer to number": ("a[0] = (size_t)a;", "line 3: a pointer cannot become .*: kernels must not see addresses"),
    "pointer to pointer": ("float** p = &a;", "line 3: pointers to pointers are not supported"),
    "pointers in memory": ("__shared__ float* p[4];", "line 3: .*pointers are not supported"),
    "array of pointers": ("float* p[4];", "line 3: arrays of pointers are not supported"),
    "function pointer": ("void (*p)(int) = 0;", "line 3: "),
    "lambda": ("auto g = [] { return 1; };", "line 3: lambdas are not supported"),
    "kernel from a kernel": ("f<<<1, 1>>>(a, n);", "line 3: <<<: a kernel cannot launch kernels"),
    "call of a kernel": ("f(a, n);", "line 3: f is a kernel"),
    "unknown name": ("a[0] = b;", "line 3: b is not declared"),
    "unknown function": ("a[0] = secret(n);", "line 3: there is no function secret"),
    "unknown type": ("Thing t;", "line 3: "),
    "atomic of halves": ("atomicAdd((__half *)a, __half(1));", "line 3: "),
    "write to const": ("const int k = n; k = 3;", "line 3: .*const: it cannot be assigned to"),
    "const is not cast away": (
        "const float* c = a; float* p = const_cast<float*>(c); *p = 1;",
        "line 3: a pointer to const cannot become",
    ),
    "two memories": (
        "__shared__ float s[4]; float* p = a; p = s;",
        "line 3: a pointer cannot change between two memories",
    ),
    "barrier of some threads": (
        "if (threadIdx.x < 3) __syncthreads();",
        "line 3: all threads of a block must reach __syncthreads: .*line 3",
    ),
    "barrier behind a return": (
        "if (threadIdx.x < 3) return;\n__syncthreads();",
        "line 4: .*some threads returned in line 3",
    ),
    "barrier in a loop of some": (
        "for (int i = 0; i < threadIdx.x; i++) __syncthreads();",
        "line 3: all threads of a block must reach __syncthreads",
    ),
    "barrier by data": (
        "if (a[threadIdx.x] > 0) __syncthreads();",
        "line 3: all threads of a block must reach __syncthreads",
    ),
    "barrier by a variable": ("int k = 0;\nif (threadIdx.x) k = 1;\nif (k) __syncthreads();", "line 5: .*line 5"),
    "shuffle in a loop of some": (
        "int i = threadIdx.x; while (i-- > 0) n += __shfl_sync(~0u, n, 0);",
        "line 3: .* must reach __shfl_sync .*without subgroups",
    ),
    "unknown intrinsic": (
        "n = __match_all_sync(~0u, n, a);",
        "line 3: __match_all_sync is not supported: compare values",
    ),
    "atomic of a type": ("atomicAnd(a, 1);", "line 3: atomicAnd of float is not supported: it takes int"),
    "vector arithmetic": ("float4 v = make_float4(1, 2, 3, 4); v = v + v;", "line 3: .*write it per component"),
    "method": ("float4 v; v.norm();", "line 3: methods are not supported"),
    "huge local array": ("float x[1 << 20];", "line 3: the array has 4194304 bytes, at most"),
    "much shared memory": (
        "__shared__ float x[30000];",
        "line 3: the kernel has 120000 bytes of shared memory, at most",
    ),
    "negative array": ("float x[-1];", "line 3: an array cannot have -1 elements"),
    "variable array": ("float x[n];", "line 3: this expression must be constant"),
    "unterminated comment": ("a[0] = 1; /* never ends", "line 3: the comment has no end"),
    "unterminated block": ("if (n) {", "line .*: the block has no closing brace"),
    "unterminated string": ('a[0] = "never', "line 3: '\"' does not start a valid token"),
    "strange character": ("a[0] = 1 @ 2;", "line 3: '@' does not start"),
    "number too large": ("unsigned long long x = 99999999999999999999;", "line 3: .*more than 64 bits"),
    "deep parentheses": ("a[0] = " + "(" * 500 + "1" + ")" * 500 + ";", "line 3: .*nested deeper than"),
    "deep blocks": ("{" * 500 + "}" * 500, "line 3: .*nested deeper than"),
    "deep operators": ("a[0] = " + "-" * 2000 + "1;", "line 3: .*nested deeper than"),
    "deep ternaries": ("a[0] = " + "n ? 1 : " * 500 + "2;", "line 3: .*nested deeper than"),
    "deep ifs": ("if (n) " * 500 + ";", "line 3: .*nested deeper than"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_translate_of_refused_construct_names_line_and_construct(what):
    body, words = REFUSED[what]
    with pytest.raises(CudaSourceError, match=words):
        lowered(body, block=(64, 1, 1))


OUTSIDE = {
    "a file": ('#include "/etc/passwd"', "line 1: cannot include '/etc/passwd': no file is read"),
    "another file": ("#include <../secret.h>", "line 1: cannot include '../secret.h'"),
    "an endless macro": ("#define A B B\n#define B C C\n" + "".join(f"#define {chr(67 + k)} {chr(68 + k)} {chr(68 + k)}\n" for k in range(22)) + "A", "macros expand to more than"),
    "an unknown directive": ("#line 3", "line 1: the directive #line is not supported"),
    "an open conditional": ("#if 1\nint f();", "line 1: this #if has no #endif"),
    "its own words": ('#error "no"', "line 1: #error"),
    "a variable": ("__device__ float x;", "line 1: x: a global variable must be constant"),
    "a constant without a value": ("__constant__ float x[4];", "line 1: x: a constant needs a value"),
    "a function of the host": ("int main() { return 0; }", "line 1: main must be __global__ or"),
    "a class": ("class X { };", "line 1: class: classes are not supported"),
    "a struct with itself": ("struct X { X x; };\n__global__ void f(int* a) { X x; }", "X contains itself"),
    "a struct with a pointer": ("struct X { int* x; };\n__global__ void f(int* a) { X x; }", "pointers in structs"),
    "recursion": ("__device__ int g(int x) { return x ? g(x - 1) : 0; }\n__global__ void f(int* a) { a[0] = g(3); }", "line 1: g calls itself: recursion"),
    "endless templates": ("template <int N> __device__ int g(int x) { return g<N + 1>(x); }\n__global__ void f(int* a) { a[0] = g<0>(3); }", "calls are nested deeper than"),
    "much code": ("__device__ int g0(int x) { return x * 3 + 1; }\n" + "".join(f"__device__ int g{k + 1}(int x) {{ return g{k}(x) + g{k}(x + 1) + g{k}(x + 2); }}\n" for k in range(16)) + "__global__ void f(int* a) { a[0] = g16(3); }", "too much code after functions"),
}  # fmt: skip


@pytest.mark.parametrize("what", OUTSIDE)
def test_translate_of_refused_top_level_names_line_and_construct(what):
    text, words = OUTSIDE[what]
    with pytest.raises(CudaSourceError, match=words):
        translate(text if "void f" in text else text + "\n__global__ void f(int* a) { }", "f", ["buffer"], ONE)


def test_parse_of_huge_source_is_refused_quickly():
    began = time.monotonic()
    with pytest.raises(CudaSourceError, match="characters, at most"):
        parse(" " * (1 << 20))
    with pytest.raises(CudaSourceError, match="more than 100000 tokens"):
        parse("; " * 110_000)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("seed", range(40))
def test_translate_of_random_changes_raises_only_source_error(seed):
    rng = np.random.default_rng(seed)
    whole = """#define T 4
    template <typename X> __device__ X g(X* p, int i) { return p[i] + (X)1; }
    __global__ void f(float* a, int n) { __shared__ float s[T]; float4 v = make_float4(1, 2, 3, 4); s[threadIdx.x % T] = v.x;
      __syncthreads(); for (int i = 0; i < n; ++i) { if (i == 3) break; a[i] = g(s, i) ? -a[i] : v.w; } atomicAdd(&a[0], 1.f); }"""
    for _ in range(30):
        text = list(whole)
        for _ in range(rng.integers(1, 6)):
            at = int(rng.integers(0, len(text)))
            match rng.integers(0, 3):
                case 0:
                    del text[at : at + int(rng.integers(1, 12))]
                case 1:
                    text.insert(at, str(rng.choice(list("(){}[]<>;,*&#\"'/\\.:?=+-0a\n"))))
                case _:
                    other = int(rng.integers(0, len(text)))
                    text[at:at] = text[other : other + int(rng.integers(1, 30))]
        for dialect in DIALECTS.values():
            try:
                translate("".join(text), "f", ["buffer", "i64"], (8, 1, 1), dialect=dialect)
            except CudaSourceError as e:
                assert str(e).startswith("line ")


def test_translate_reports_written_parameters():
    made = translate(
        "__device__ void put(float* p) { *p = 1; }\n__global__ void f(float* a, float* b, const float* c, float* d) { put(b); atomicAdd(d, c[0] + a[0]); }",
        "f",
        ["buffer"] * 4,
        ONE,
    )
    assert made.writes == (False, True, False, True)


def test_translate_of_too_many_variables_is_refused():
    body = "float x[512]; for (int i = 0; i < 512; i++) x[i] = i; a[0] = x[n];"
    lowered(body, block=(64, 1, 1))
    with pytest.raises(CudaSourceError, match=r"1024 threads have .* bytes of variables each"):
        translate(
            f"__global__ void f(float* a, int n) {{ {body} {body.replace('x', 'y')} }}",
            "f",
            ["buffer", "i64"],
            (1024, 1, 1),
        )


def test_launch_with_many_variables_and_barriers_runs_or_is_refused(launch):
    """Variables around barriers are in the block's memory. A stack would need them per thread of the block and of the device."""
    body = "float x[%d]; for (int i = 0; i < %d; i++) x[i] = i + threadIdx.x; __syncthreads(); a[threadIdx.x] = x[n %% %d];"
    a = np.zeros(1024, np.float32)
    text = "__global__ void f(float* a, int n) { " + body % (80, 80, 80) + " }"
    status, _ = launch(text, "f", [a, 7], block=(1024, 1, 1))
    assert status[1] == 0
    assert np.array_equal(a, 7 + np.arange(1024))
    with pytest.raises(CudaSourceError, match=r"1024 threads have .* bytes each of variables around barriers"):
        launch(text.replace("80", "200"), "f", [a, 7], block=(1024, 1, 1))


def test_translate_of_loop_without_known_end_checks_for_stop():
    endless = (
        "for (;;) a[0] += 1;",
        "while (n) ;",
        "do { a[0]++; } while (true);",
        "for (int i = 0; i < 10; i--) a[0] += i;",
    )
    for body in (
        *endless,
        "for (int i = 0; i < 100; i++) for (int j = 0; j < 1000; j++) for (int k = 0; k < 1000; k++) a[0] += k;",
    ):
        for dialect in DIALECTS.values():
            text = lowered(body, dialect=dialect).text
            assert text.count("w_go(w_status)") > 1, body  # the first one is at the start
    assert lowered("for (int i = 0; i < 16; i++) a[i] = i;").text.count("w_go(w_status)") == 1


def test_translate_for_cuda_uses_native_barriers_and_shuffles():
    text = lowered("n += __shfl_xor_sync(~0u, n, 1); __syncthreads(); a[0] = n;", block=(64, 1, 1), dialect=CUDA).text
    assert "__syncthreads()" in text and "__shfl_sync" in text


# -- on the device ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launch():
    """Builds and launches a kernel on PoCL; returns its status, and the description of the failed access."""
    cl = pytest.importorskip("pyopencl", reason="kernels run through OpenCL: pip install 'pyopencl[pocl]'")
    from wooly_compiler.build import opencl

    device = opencl.default_device()
    types = {"i64": np.int64, "f64": np.float64}

    def run(text, entry, args, grid=ONE, block=ONE, **more):
        kinds = ["buffer" if isinstance(x, np.ndarray) else "i64" if isinstance(x, int) else "f64" for x in args]
        made = translate(text, entry, kinds, block, **more)
        program = opencl.program_of(device, made.text)
        kernel, status = cl.Kernel(program, made.entry), np.zeros(8, np.int32)
        values = [opencl.wrap(device, status)]
        for x, kind in zip(args, kinds, strict=True):
            raw = x.reshape(-1).view(np.uint8) if kind == "buffer" else None
            values += [types[kind](x)] if raw is None else [opencl.wrap(device, raw), np.uint64(raw.nbytes)]
        event = kernel(device.queue, tuple(g * b for g, b in zip(grid, block, strict=True)), block, *values)
        event.wait()
        return status, made.places[status[2]] if status[1] else ""

    return run


WILD = {
    "beyond": ("a[n] = 1;", 64, 2, "line 1, argument 0 (a),"),
    "before": ("a[-n] = 1;", 1, 2, "line 1, argument 0 (a),"),
    "far": ("a[n] = 1;", 1 << 61, 2, "line 1, argument 0 (a),"),
    "round the end": ("a[n] = 1;", 1 << 62, 0, ""),
    "read": ("a[0] = a[n];", 1 << 33, 1, "line 1, argument 0 (a),"),
    "through a pointer": ("float* p = a; p += n; *p = 1;", 100, 2, "line 1, argument 0 (a),"),
    "through a cast": ("((float4*)a)[n].w = 1;", 16, 2, "line 1, argument 0 (a),"),
    "beside": ("((float4*)(a + 61))[0].w = 1;", 0, 2, "line 1, argument 0 (a),"),
    "atomic": ("atomicAdd(a + n, 1.f);", 64, 3, "line 1, argument 0 (a),"),
    "shared": ("__shared__ float s[4]; s[n] = 1; a[0] = s[n];", 4, 2, "line 1, the shared array s,"),
    "own": ("float s[4]; s[n] = 1; a[0] = s[n];", 4, 2, "line 1, the array s,"),
    "null": ("float* p = nullptr; p[n] = 1;", 0, 2, "line 1, a null pointer,"),
    "constant": ("a[0] = table[n];", 3, 1, "line 1, the constant table,"),
    "wrapping int": ("int i = 2147483647; i += n; a[i] = 1;", 1, 2, "line 1, argument 0 (a),"),
    "assertion": ("assert(n == 3);", 4, 4, "line 1, an assertion,"),
    "trap": ("if (n) __trap();", 4, 5, "line 1, a trap,"),
}


@pytest.mark.parametrize("what", WILD)
def test_launch_with_access_out_of_bounds_changes_nothing_and_reports_it(what, launch):
    body, n, kind, place = WILD[what]
    memory = np.full(192, 7, np.float32)
    text = f"__constant__ float table[3] = {{1, 2, 3}}; __global__ void f(float* a, long long n) {{ {body} }}"
    status, where = launch(text, "f", [memory[64:128], n])
    assert (int(status[1]), where) == (kind, place)
    assert (memory[:64] == 7).all() and (memory[128:] == 7).all()
    if kind:
        assert set(memory[64:128]) <= {0, 7}


def test_launch_with_barrier_and_all_indices_out_of_bounds_reports_it(launch):
    memory = np.full(96, 7, np.int32)
    text = "__global__ void f(int* a) { __shared__ int s[32]; s[threadIdx.x] = 1; __syncthreads(); a[threadIdx.x - 16] = s[63 - threadIdx.x]; }"
    status, where = launch(text, "f", [memory[32:64]], block=(64, 1, 1))
    assert status[1] == 2 and "the shared array s" in where
    assert (memory[:32] == 7).all() and (memory[64:] == 7).all()


def test_launch_starts_with_zeros_in_shared_memory_and_variables(launch):
    text = """__global__ void f(int* a) { __shared__ int s[64]; int x; int y[4]; float4 v; a[threadIdx.x] = s[threadIdx.x] + x + y[2] + (int)v.z; }"""
    fill = (
        "__global__ void g(int* a) { __shared__ int s[64]; s[threadIdx.x] = 5; a[threadIdx.x] = s[63 - threadIdx.x]; }"
    )
    a = np.ones(64, np.int32)
    launch(fill, "g", [a], block=(64, 1, 1))
    launch(text, "f", [a], block=(64, 1, 1))
    assert not a.any()


def test_arithmetic_that_c_leaves_undefined_has_defined_results(launch):
    text = """__global__ void f(int* a, int zero, int least) {
      a[0] = 5 / zero; a[1] = 5 % zero; a[2] = least / -1; a[3] = least / (zero - 1); a[4] = least % (zero - 1);
      a[5] = 1 << (zero + 33); a[6] = (int)(1e20f * (zero + 1)); a[7] = (int)(0.f / zero); a[8] = (unsigned char)(300 + zero);
      a[9] = least - 1 == 2147483647; a[10] = -7 / (zero + 2); a[11] = -7 % (zero + 3); a[12] = (unsigned)(-1.5f + zero); a[13] = -7 >> (zero + 1);
    }"""
    a = np.zeros(14, np.int32)
    status, _ = launch(text, "f", [a, 0, -(1 << 31)])
    least = -(1 << 31)
    assert status[1] == 0
    assert a.tolist() == [0, 0, least, least, 0, 2, (1 << 31) - 1, 0, 44, 1, -3, -1, 0, -4]


@pytest.mark.parametrize("block", [(64, 1, 1), (4, 4, 4)])
def test_barriers_in_loops_and_conditions_give_the_expected_result(launch, block):
    """Variables of each thread survive barriers. Loops and conditions around barriers are evaluated once for the block."""
    text = """__device__ void turn(int* s, int t) { int mine = s[(t + 1) % 64]; __syncthreads(); s[t] = mine; __syncthreads(); }
    __global__ void f(int* out, const int* asked, int n) {
      __shared__ int s[64];
      int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z), sum = 0;
      if ((int)blockIdx.x >= asked[0]) return;
      s[t] = t;
      __syncthreads();
      for (int i = 0; i < n; i++) {
        if (i == 2) continue;
        if (i == 5) break;
        turn(s, t);
        if (t % 2) sum += s[t]; else sum -= i;
        if (asked[1]) { int x = s[63 - t]; __syncthreads(); s[t] = x; }
        __syncthreads();
      }
      int k = n;
      do { sum += s[t]; __syncthreads(); } while (--k > 0);
      if (t >= 60) return;
      out[blockIdx.x * 64 + t] = sum;
    }"""

    def expected(asked, n):
        out = np.zeros((3, 64), np.int32)
        for b in range(min(asked[0], 3)):
            s, total = np.arange(64), np.zeros(64, np.int64)
            for i in range(n):
                if i == 2:
                    continue
                if i == 5:
                    break
                s = np.roll(s, -1)
                total += np.where(np.arange(64) % 2, s, -i)
                s = s[::-1] if asked[1] else s
            total += s * max(n, 1)
            out[b, :60] = total[:60]
        return out

    for asked in ([2, 0], [3, 1]):
        for n in (0, 1, 4, 9):
            out = np.zeros((3, 64), np.int32)
            status, _ = launch(text, "f", [out, np.array(asked, np.int32), n], grid=(3, 1, 1), block=block)
            assert status[1] == 0
            assert np.array_equal(out, expected(asked, n)), (asked, n)


FUNCTIONS = {
    "expf": torch.exp, "logf": torch.log, "sqrtf": torch.sqrt, "rsqrtf": torch.rsqrt, "tanhf": torch.tanh, "sinf": torch.sin,
    "cosf": torch.cos, "erff": torch.erf, "floorf": torch.floor, "ceilf": torch.ceil, "truncf": torch.trunc, "fabsf": torch.abs,
    "log1pf": torch.log1p, "expm1f": torch.expm1, "rintf": torch.round, "atanf": torch.atan, "__expf": torch.exp, "exp2f": torch.exp2,
}  # fmt: skip


def test_functions_equal_torch(launch):
    x = torch.linspace(0.01, 5, 64)
    for_each = " ".join(f"out[{k} * 64 + i] = {name}(x[i]);" for k, name in enumerate(FUNCTIONS))
    out = np.zeros((len(FUNCTIONS), 64), np.float32)
    text = f"__global__ void f(const float* x, float* out) {{ int i = threadIdx.x; {for_each} }}"
    launch(text, "f", [x.numpy(), out], block=(64, 1, 1))
    for row, (name, function) in zip(out, FUNCTIONS.items(), strict=True):
        torch.testing.assert_close(
            torch.from_numpy(row), function(x), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_tanh_of_large_numbers_is_one(launch):
    x = np.array([9.02, 10, 100, 1e30, np.inf, -9.02, -50, -np.inf, 0.0, -0.0, np.nan, 0.5])
    single, double = np.zeros(len(x), np.float32), np.zeros(len(x))
    text = """__global__ void f(const double* x, float* single, double* both) {
      int i = threadIdx.x; single[i] = tanhf((float)x[i]); both[i] = tanh(x[i]); }"""
    launch(text, "f", [x, single, double], block=(len(x), 1, 1))
    assert single[:8].tolist() == [1, 1, 1, 1, 1, -1, -1, -1]
    np.testing.assert_allclose(single, np.tanh(x).astype(np.float32), rtol=1e-6)
    np.testing.assert_allclose(double, np.tanh(x), rtol=1e-15)
    assert np.signbit(single[9]) and np.signbit(double[9])


def test_atomics_of_many_threads_give_the_expected_result(launch):
    text = """__global__ void f(int* i, unsigned long long* w, float* x, unsigned* u) {
      atomicAdd(&i[0], 1); atomicSub(&i[1], 2); atomicMax(&i[2], (int)threadIdx.x); atomicMin(&i[3], -(int)threadIdx.x); atomicOr(&i[4], 1 << (threadIdx.x % 8));
      atomicExch(&i[5], 9); atomicCAS(&i[6], 0, 4); atomicAdd(w, 1ull << 33); atomicAdd(x, 0.5f); atomicInc(&u[0], 9u); atomicDec(&u[1], 5u); atomicXor(&i[7], 1);
      __shared__ int s; atomicAdd(&s, 1); __syncthreads(); if (threadIdx.x == 0) atomicAdd(&i[8], s); }"""
    i, w, x, u = np.zeros(9, np.int32), np.zeros(1, np.uint64), np.zeros(1, np.float32), np.zeros(2, np.uint32)
    status, _ = launch(text, "f", [i, w, x, u], grid=(4, 1, 1), block=(32, 1, 1))
    assert status[1] == 0
    assert i.tolist() == [128, -256, 31, -31, 255, 9, 4, 0, 128]
    assert (w[0], x[0], u[0]) == (128 << 33, 64, 128 % 10)


def test_reference_page_equals_the_generated_one():
    written = (Path(__file__).parents[3] / "docs/reference/cuda-c.md").read_text()
    assert written == page(), "make docs"
