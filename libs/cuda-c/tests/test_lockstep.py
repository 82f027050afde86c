# ruff: noqa: E501 (sources in one line)
"""CUDA C for threads in lockstep: the same results and reports as for each thread on its own, and no check in the loops."""

import functools
import re

import numpy as np
import pytest
from wooly_cuda_c.printing import translate as translation
from wooly_cuda_c.printing.dialects import CUDA
from wooly_cuda_c.printing.translate import translate
from wooly_testkit.effort import sweep

GUARD, SIZE = 256, 1000


@pytest.fixture(scope="module")
def launch():
    """Builds and launches a kernel on PoCL, with threads in lockstep or not; returns its status and the place of a violation."""
    cl = pytest.importorskip("pyopencl", reason="kernels run through OpenCL: pip install 'pyopencl[pocl]'")
    from wooly_compiler.build import opencl

    device = opencl.default_device()

    @functools.cache
    def built(text, kinds, block, together, **more):
        with pytest.MonkeyPatch.context() as patch:
            if not together:
                patch.setattr(translation, "FEW", 1 << 20)
            made = translate(text, "f", kinds, block, **more)
        program = opencl.program_of(device, made.text)
        return made, cl.Kernel(program, made.entry)

    def run(text, args, grid, block, together, **more):
        made, kernel = built(
            text, tuple("buffer" if isinstance(x, np.ndarray) else "i64" for x in args), block, together, **more
        )
        assert together or "_together" not in made.text
        status = np.zeros(8, np.int32)
        values = [opencl.wrap(device, status)]
        for x in args:
            values += (
                [opencl.wrap(device, x.view(np.uint8)), np.uint64(x.nbytes)]
                if isinstance(x, np.ndarray)
                else [np.int64(x)]
            )
        kernel(device.queue, tuple(g * b for g, b in zip(grid, block, strict=True)), block, *values)
        device.queue.finish()
        return int(status[1]), made.places[status[2]] if status[1] else ""

    return run


PARAMS = "const float* x, float* y, int* z, int n, int m"
LINE, PLANE, CUBE = (64, 1, 1), (16, 8, 1), (4, 4, 4)
AT = "int i = blockIdx.x * blockDim.x + threadIdx.x;"
#: The body, and the block. There are 5 blocks along x and 2 along y; `x` and `z` have 1000 elements, `y` too.
BODIES = {
    "tail": (AT + "if (i < n) y[i] = x[i] * 2 + m;", LINE),
    "early return": (AT + "if (i >= n) return; y[i] = x[i]; z[i] = i;", LINE),
    "both branches": (AT + "if (i < n) y[i] = x[i]; else z[i] = m;", LINE),
    "choice": (AT + "y[i] = i < n ? x[i] : -1.f;", LINE),
    "guarded choice": (AT + "y[i] = i < n && i >= m ? x[i - m] : -1.f;", LINE),
    "backward": (AT + "if (i < n) y[n - 1 - i] = x[i];", LINE),
    "strided": (AT + "if (i * 3 < n) y[i * 3] = x[3 * i + 1];", LINE),
    "strides of the launch": (AT + "if (i < n) y[i * m] = x[i];", LINE),
    "unsigned": ("unsigned i = blockIdx.x * blockDim.x + threadIdx.x; if (i + m < n) y[i] = x[i + m];", LINE),
    "unsigned that wraps": ("unsigned i = threadIdx.x - m; if (i < n) y[i] = x[i];", LINE),
    "signed that wraps": ("int i = 2147483600 + (int)threadIdx.x + m; if (i < n) z[threadIdx.x] = i;", LINE),
    "wide": ("long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; if (i < n) y[i] = x[i];", LINE),
    "gather": (AT + "if (i < n) y[i] = x[z[i]];", LINE),
    "scatter": (AT + "if (i < n) z[(i * 7) % n] = i;", LINE),
    "data decides": (AT + "if (i < n) { if (x[i] > 0) y[i] = sqrtf(x[i]); else z[i] = -i; }", LINE),
    "updates": (AT + "if (i < n) { y[i] += x[i]; z[i]++; z[i] *= m; }", LINE),
    "vectors": ("int i = threadIdx.x; if (i < n / 4) { float4 v = ((const float4*)x)[i]; v.x += v.w; ((float4*)y)[i] = v; }", LINE),
    "pointers": (AT + "const float* p = x + blockIdx.y * n; if (i < n) { float* q = y + i; *q = p[i]; }", LINE),
    "strides of the grid": (AT + "for (; i < n; i += blockDim.x * gridDim.x) y[i] = x[i] + 1;", LINE),
    "loop with strides of the grid": ("for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) y[i] = x[i] + 1;", LINE),
    "loop down": ("float s = 0; for (int i = n - 1 - threadIdx.x; i >= 0; i -= blockDim.x) s += x[i]; y[threadIdx.x] = s;", LINE),
    "loop of unsigned numbers": ("float s = 0; for (unsigned i = threadIdx.x; i < n; i += 64u) s += x[i]; y[threadIdx.x] = s;", LINE),
    "step 0": ("float s = 0; for (int i = threadIdx.x; i < n && s < 500; i += m - m + 1) s += 1; y[threadIdx.x] = s;", LINE),
    "end of each thread": ("float s = 0; for (int i = 0; i < threadIdx.x % 7 + m; i++) s += x[i]; y[threadIdx.x] = s;", LINE),
    "loop in a loop": ("float s = 0; for (int i = 0; i < 5; i++) for (int k = threadIdx.x; k < n; k += 64) s += x[k] * i; y[threadIdx.x] = s;", LINE),
    "loop in a branch": (AT + "if (i < n) { float s = 0; for (int k = 0; k < m; k++) s += x[k] * x[i]; y[i] = s; }", LINE),
    "loop after a return": (AT + "if (i >= n) return; float s = 0; for (int k = 0; k < m; k++) s += x[(i + k) % 1000]; y[i] = s;", LINE),
    "varies in the loop": ("int k = threadIdx.x; float s = 0; for (int i = 0; i < m; i++) { s += x[k]; k = (k * 5 + 1) % 1000; } y[threadIdx.x] = s;", LINE),
    "break": ("float s = 0; for (int i = threadIdx.x; i < n; i += 64) { if (x[i] > 1.5f) break; s += x[i]; } y[threadIdx.x] = s;", LINE),
    "loop in two dimensions": ("int r = threadIdx.y, c = threadIdx.x; float s = 0; if (r < m && c < n) { for (int k = 0; k < m; k++) s += x[r * m + k] * x[k * 16 + c]; y[r * 16 + c] = s; }", PLANE),
    "plane": ("int r = blockIdx.y * 8 + threadIdx.y, c = blockIdx.x * 16 + threadIdx.x; if (r < m && c < n) y[r * n + c] = x[r * n + c];", PLANE),
    "transposed": ("int r = threadIdx.y, c = threadIdx.x; if (r < m && c < n) y[c * 8 + r] = x[r * 16 + c];", PLANE),
    "cube": ("int i = threadIdx.x + 4 * (threadIdx.y + 4 * threadIdx.z); if (i < n) y[i] = x[threadIdx.z * 16 + threadIdx.y * 4 + threadIdx.x];", CUBE),
    "shared": ("__shared__ float s[64]; int t = threadIdx.x; s[t] = t < n ? x[t] : 0.f; __syncthreads(); y[t] = s[63 - t]; __syncthreads(); for (int k = 32; k > 0; k >>= 1) { if (t < k) s[t] += s[t + k]; __syncthreads(); } y[64 + t] = s[0];", LINE),
    "shared, of the launch": ("extern __shared__ float s[]; int t = threadIdx.x; for (int i = t; i < 128; i += 64) s[i] = x[i]; __syncthreads(); y[t] = s[t + 64];", LINE),
    "tiles": ("__shared__ float s[8][17]; int r = threadIdx.y, c = threadIdx.x; float v = 0; for (int t = 0; t < m; t++) { s[r][c] = t * 16 + c < n ? x[t * 16 + c] : 0.f; __syncthreads(); for (int k = 0; k < 16; k++) v += s[r][k] * x[k * 16 + c]; __syncthreads(); } y[r * 16 + c] = v;", PLANE),
    "warps": ("float v = x[threadIdx.x]; for (int o = 16; o > 0; o >>= 1) v += __shfl_down_sync(~0u, v, o); y[threadIdx.x] = v; z[threadIdx.x] = __ballot_sync(~0u, v > 0);", LINE),
}  # fmt: skip
#: Values of `n` and `m`, usual and hostile.
NUMBERS = [
    (1000, 1),
    (300, 3),
    (320, 7),
    (64, 8),
    (63, 2),
    (0, 0),
    (1001, 1),
    (1 << 30, 1 << 20),
    (-1, -1),
    (-(1 << 31), (1 << 31) - 1),
    (700, -700),
]


def memory():
    """Return the arrays x, y, z with guards before and after them, all seen from their guards."""
    random = np.random.default_rng(0)
    whole = [
        random.standard_normal(SIZE + 2 * GUARD).astype(np.float32),
        np.full(SIZE + 2 * GUARD, 7, np.float32),
        random.integers(0, SIZE, SIZE + 2 * GUARD).astype(np.int32),
    ]
    return whole, [a[GUARD:-GUARD] for a in whole]


#: Parts of bodies that are translated in ways of their own.
PARTS = (
    *("for (int k", "for (unsigned", "for (;", "i--", "while", "break", "return", "else", " ? ", "+=", "z[", "x[z["),
    *("float4", "const float*", "long long", "unsigned i", "int r", "gridDim", "__shared__", "extern", "__shfl"),
)


def kinds_of(name):
    """The kinds of a body: its block, and the parts that it has."""
    body, block = BODIES[name]
    return block, *[part for part in PARTS if part in body]


@pytest.mark.parametrize("name", sweep(BODIES, 8, kinds_of))
def test_threads_in_lockstep_have_the_results_of_threads_in_turn(launch, name):
    """Also where indices are out of bounds, or wrap: memory and reports are the same, and nothing beside the arrays changes."""
    body, block = BODIES[name]
    text = f"__global__ void f({PARAMS}) {{ {body} }}"
    for n, m in NUMBERS:
        if "for (" in body and (max(n, m) > 10000 or min(n, m) < 0):
            continue
        found = []
        for together in (True, False):
            whole, arrays = memory()
            before = [a.copy() for a in whole]
            kind, place = launch(text, [*arrays, n, m], (5, 2, 1), block, together, shared=512 * ("shared" in body))
            for a, b in zip(whole, before, strict=True):
                assert np.array_equal(a[:GUARD], b[:GUARD]) and np.array_equal(a[-GUARD:], b[-GUARD:])
            found.append((kind, place, [a.tobytes() for a in whole]))
        assert found[0][:2] == found[1][:2], (n, m)
        assert found[0][2] == found[1][2], (n, m)


def test_access_by_one_thread_out_of_bounds_is_reported(launch):
    for block, body in (
        (LINE, "int i = threadIdx.x; y[i + n] = x[i];"),
        (PLANE, "y[threadIdx.y * 16 + threadIdx.x + n] = 1;"),
    ):
        threads = block[0] * block[1]
        for n, kind in ((SIZE - threads, 0), (SIZE - threads + 1, 2), (0, 0), (-1, 2)):
            whole, arrays = memory()
            found, place = launch(f"__global__ void f({PARAMS}) {{ {body} }}", [*arrays, n, 0], (1, 1, 1), block, True)
            assert found == kind and ("argument 1 (y)" in place) == bool(kind), (block, n)
            assert (whole[1][:GUARD] == 7).all() and (whole[1][-GUARD:] == 7).all()


def inverse(n, bits):
    """The number that n times is 1 more than a multiple of a power of two, as a signed number."""
    found = pow(n, -1, 1 << bits)
    return found - (1 << 64) if found >= 1 << 63 else found


#: By index: the block, and the stride whose product wraps between the corners.
STRIDES = {
    "threadIdx.x * (unsigned long long)s": (LINE, inverse(63, 62)),
    "threadIdx.x * s": (LINE, inverse(63, 62)),
    "500 - threadIdx.x * s": (LINE, inverse(63, 62)),
    "threadIdx.x * (s / 2) * 2": (LINE, 2 * inverse(63, 61)),
    "(unsigned)(threadIdx.x * s)": (LINE, inverse(63, 64)),
    "(int)(threadIdx.x * s)": (LINE, inverse(63, 64)),
    "threadIdx.x + threadIdx.y * s": (PLANE, inverse(7, 62)),
    "threadIdx.x * s + threadIdx.y": (PLANE, inverse(15, 62)),
}
ACCESSES = ("y[{}] = 1.f;", "y[0] = y[{}];", "y[{}] += 1.f;", "float* q = y + ({}); *q = 1.f;")


@pytest.mark.parametrize(
    "case", sweep([f"{index} in {a}" for a in ACCESSES for index in STRIDES], 64, lambda case: case.split(" in "))
)
def test_stride_that_wraps_between_the_corners_of_a_block_is_reported(launch, case):
    """The first and the last thread are within bounds, the threads between them are not."""
    index, access = case.split(" in ")
    block, stride = STRIDES[index]
    text = f'extern "C" __global__ void f(float* y, long long s) {{ {access.format(index)} }}'
    reports = []
    for together in (True, False):
        y = np.zeros(2 * GUARD + SIZE, np.float32)
        reports.append(launch(text, (y[GUARD:-GUARD], stride), (1, 1, 1), block, together)[0])
        assert not y[:GUARD].any() and not y[-GUARD:].any()
    assert reports[0] == reports[1] != 0


#: Bodies whose first and last accesses may look even, with the number that they get.
HOSTILE = {
    "address of a parameter": ("int* q = &n; *q = (int)threadIdx.x * 100000000; y[n] = 1.f;", 0),
    "reference to a parameter": ("int& q = n; q = (int)threadIdx.x * 100000000; y[n] = 1.f;", 0),
    "address of a variable": (
        "int i = threadIdx.x; int* q = &i; *q = n + (int)threadIdx.x * 100000000; y[i] = 1.f;",
        0,
    ),
    "pointer that moves in a loop": (
        "for (int i = threadIdx.x; i < 1000000000; i += 64) { y += 100000000; y[i] = 1.f; }",
        0,
    ),
    "variable that one thread changes": ("int i = threadIdx.x; if (threadIdx.x == 7) i = 2000000000; y[i] = 1.f;", 0),
    "shadowed variable": ("int i = threadIdx.x; { int i = threadIdx.x * 200000000; y[i] = 1.f; } y[i] = 1.f;", 0),
    "changed variable": ("int i = threadIdx.x; i *= n; i += 3; y[i] = 1.f;", 40000000),
    "below the buffer": ("y[(int)threadIdx.x - n] = 1.f;", 40),
    "shift": ("y[threadIdx.x << n] = 1.f;", 26),
    "narrow number": ("short i = (short)(threadIdx.x * n); y[i] = 1.f;", 1000),
    "product of wide numbers": ("long long a = n; y[threadIdx.x * a * a * a] = 1.f;", 3000000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_uneven_access_out_of_bounds_is_reported(launch, name):
    body, n = HOSTILE[name]
    for together in (True, False):
        y = np.zeros(2 * GUARD + SIZE, np.float32)
        text = f'extern "C" __global__ void f(float* y, int n) {{ {body} }}'
        assert launch(text, (y[GUARD:-GUARD], n), (1, 1, 1), LINE, together)[0] == 2
        assert not y[:GUARD].any() and not y[-GUARD:].any()


@pytest.mark.parametrize(
    ("kind", "first", "end"),
    [("unsigned long long", -100, -50), ("long long", (1 << 63) - 100, (1 << 63) - 50), ("unsigned", -100, -50)],
)
def test_comparison_of_numbers_that_wrap_between_the_corners_of_a_block_is_that_of_each_thread(
    launch, kind, first, end
):
    text = (
        f'extern "C" __global__ void f(int* y, long long a, long long b) {{ {kind} i = ({kind})a + ({kind})(threadIdx.x * 2);'
        f" y[threadIdx.x] = i < ({kind})b ? 1 : 2; }}"
    )
    found = []
    for together in (True, False):
        y = np.zeros(64, np.int32)
        assert launch(text, (y, first, end), (1, 1, 1), LINE, together)[0] == 0
        found.append(y.tolist())
    assert found[0] == found[1] and len(set(found[0])) == 2


def test_loops_over_threads_of_even_accesses_have_no_checks():
    text = translate(
        f"__global__ void f({PARAMS}) {{ {BODIES['loop with strides of the grid'][0]} }}",
        "f",
        ["buffer"] * 3 + ["i64"] * 2,
        LINE,
    ).text
    fast = re.findall(r'vectorize\(assume_safety\)"\)\n(.*?)_together', text, re.DOTALL)
    assert any("w_near_store_g_w_f32" in part for part in fast) and not any("w_status" in part for part in fast)
    assert "for (v_grown" in text  # iterations of all threads


@pytest.mark.parametrize(
    "name", ["tail", "strides of the launch", "shared", "tiles", "loop in a branch", "plane", "cube"]
)
def test_usual_code_runs_in_lockstep(name):
    body, block = BODIES[name]
    kinds = ["buffer"] * 3 + ["i64"] * 2
    text = translate(f"__global__ void f({PARAMS}) {{ {body} }}", "f", kinds, block, shared=512).text
    assert re.search(r"^ .*w_near_", text, re.MULTILINE)


def test_other_dialects_have_no_lockstep():
    text = translate(
        f"__global__ void f({PARAMS}) {{ {BODIES['tail'][0]} }}", "f", ["buffer"] * 3 + ["i64"] * 2, LINE, dialect=CUDA
    ).text
    assert "w_near" not in text and "_together" not in text


@pytest.mark.parametrize(("variables", "together"), [(20, True), (140, False)])
def test_kernel_with_too_many_variables_for_lockstep_is_translated(variables, together):
    declared = " ".join(f"float v{k} = x[i + {k}];" for k in range(variables))
    used = " ".join(f"y[i] += v{k};" for k in range(variables))
    text = f"__global__ void f({PARAMS}) {{ {AT} {declared} {used} }}"
    assert ("_together" in translate(text, "f", ["buffer"] * 3 + ["i64"] * 2, (1024, 1, 1)).text) == together


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("source", ["extern __shared__ float s[];", "__shared__ float s[64];"])
def test_kernel_with_shared_memory_and_without_barrier_checks_each_thread(launch, source, together):
    _, arrays = memory()
    body = source + AT + "s[threadIdx.x] = x[i]; if (i < n) y[i] = s[threadIdx.x] + s[63];"
    assert launch(
        f"__global__ void f({PARAMS}) {{ {body} }}", [*arrays, 300, 0], (5, 1, 1), LINE, together, shared=256
    ) == (0, "")
    assert np.array_equal(arrays[1][300:], np.full(700, 7, np.float32)) and (arrays[1][:300] != 7).all()


@pytest.mark.parametrize("how", ["", "_up", "_down", "_xor"])
def test_exchange_over_one_distance_equals_exchange_over_a_distance_per_thread(launch, how):
    whole = f"z[t] = __shfl{how}_sync(~0u, t * 3, m); z[200 + t] = __shfl{how}_sync(~0u, t * 3, m + t * 0);"
    part = (
        f"if (t / 32 == 2) {{ z[t] = __shfl{how}_sync(~0u, t, m); z[200 + t] = __shfl{how}_sync(~0u, t, m + t * 0); }}"
    )
    lane = np.arange(128) % 32
    for body, factor, threads in ((whole, 3, slice(0, 128)), (part, 1, slice(64, 96))):
        text = f"__global__ void f({PARAMS}) {{ int t = threadIdx.x; {body} }}"
        for m in (0, 1, 5, 16, 31, 32, 40):
            _, (x, y, z) = memory()
            z[:] = -1
            assert launch(text, [x, y, z, 0, m], (1, 1, 1), (128, 1, 1), True) == (0, "")
            assert np.array_equal(z[:128], z[200:328])
            if m < 32:
                other = {"": lane * 0 + m, "_up": lane - m, "_down": lane + m, "_xor": lane ^ m}[how]
                other = np.where((other >= 0) & (other < 32), other, lane)
                expected = (np.arange(128) - lane + other) * factor
                assert np.array_equal(z[:128][threads], expected[threads])
                assert (np.delete(z[:128], np.arange(128)[threads]) == -1).all()
