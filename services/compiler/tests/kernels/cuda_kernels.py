"""Well-known kernels in CUDA C, and a kernel that uses many features of the language."""

ADD = """
extern "C" __global__ void add(const float* a, const float* b, float* c, int n) {
    int i = threadIdx.x + blockIdx.x * blockDim.x;
    if (i < n)
        c[i] = a[i] + b[i];
}
"""

HISTOGRAM = """
#define BINS 64
__global__ void histogram(const int* __restrict__ values, int* bins, int n) {
    __shared__ int mine[BINS];
    for (int k = threadIdx.x; k < BINS; k += blockDim.x) mine[k] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&mine[values[i]], 1);
    __syncthreads();
    for (int k = threadIdx.x; k < BINS; k += blockDim.x) atomicAdd(bins + k, mine[k]);
}
"""

REDUCE = """
__global__ void reduce(const float* x, float* out, int n) {
    extern __shared__ float part[];
    unsigned int t = threadIdx.x;
    float sum = 0.f;
    for (int i = blockIdx.x * blockDim.x + t; i < n; i += blockDim.x * gridDim.x) sum += __ldg(&x[i]);
    part[t] = sum;
    __syncthreads();
    for (unsigned int s = blockDim.x / 2; s > 0; s >>= 1) {
        if (t < s) part[t] += part[t + s];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = part[0];
}
"""

WARPS = """
template <typename T> __inline__ __device__ T warp_sum(T v) {
    for (int offset = warpSize / 2; offset > 0; offset >>= 1) v += __shfl_down_sync(0xffffffff, v, offset);
    return v;
}
__device__ float block_sum(float v) {
    static __shared__ float part[32];
    int lane = threadIdx.x % warpSize, warp = threadIdx.x / warpSize;
    v = warp_sum(v);
    if (lane == 0) part[warp] = v;
    __syncthreads();
    v = threadIdx.x < blockDim.x / warpSize ? part[lane] : 0.f;
    if (warp == 0) v = warp_sum(v);
    return v;
}
__global__ void row_sums(const float* x, float* out, int columns) {
    float v = 0.f;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) v += x[blockIdx.x * columns + c];
    v = block_sum(v);
    if (threadIdx.x == 0) out[blockIdx.x] = v;
}
__global__ void votes(const int* x, unsigned* bits, int* counts) {
    unsigned b = __ballot_sync(0xffffffffu, x[threadIdx.x] > 0);
    int n = __syncthreads_count(x[threadIdx.x] > 0);
    if (threadIdx.x % 32 == 0) bits[threadIdx.x / 32] = b;
    if (threadIdx.x == 0) { counts[0] = n; counts[1] = __popc(b); }
    int all = __all_sync(~0u, x[threadIdx.x] > -100), any = __any_sync(~0u, x[threadIdx.x] > 100);
    if (threadIdx.x == 33) { counts[2] = all; counts[3] = any; }
}
"""

TEMPLATE = """
template <typename T, int TIMES> __device__ T repeated(T x) {
    T sum = T(0);
    #pragma unroll
    for (int k = 0; k < TIMES; ++k) sum += x;
    return sum;
}
template <typename T, int TIMES = 2, bool MINUS = false>
__global__ void scale(const T* x, T* y, size_t n) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= n) return;
    if constexpr (MINUS) y[i] = -repeated<T, TIMES>(x[i]);
    else y[i] = repeated<T, TIMES>(x[i]);
}
"""

STENCIL = """
constexpr int R = 1;
__constant__ float weight[3][3] = {{0.f, 0.25f, 0.f}, {0.25f, -1.f, 0.25f}, {0.f, 0.25f, 0.f}};
__global__ void stencil(const float* x, float* y, int height, int width) {
    int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (column >= width || row >= height) return;
    float sum = 0.f;
    for (int i = -R; i <= R; i++)
        for (int j = -R; j <= R; j++) {
            int r = min(max(row + i, 0), height - 1), c = min(max(column + j, 0), width - 1);
            sum += weight[i + R][j + R] * x[r * width + c];
        }
    y[row * width + column] = sum;
}
"""

MATMUL = """
#define TILE 16
__global__ void matmul(const float* A, const float* B, float* C, int m, int n, int k) {
    __shared__ float a[TILE][TILE], b[TILE][TILE + 1];
    int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int t = 0; t < (k + TILE - 1) / TILE; ++t) {
        int ka = t * TILE + threadIdx.x, kb = t * TILE + threadIdx.y;
        a[threadIdx.y][threadIdx.x] = row < m && ka < k ? A[row * k + ka] : 0.f;
        b[threadIdx.y][threadIdx.x] = kb < k && column < n ? B[kb * n + column] : 0.f;
        __syncthreads();
        for (int i = 0; i < TILE; ++i) sum += a[threadIdx.y][i] * b[i][threadIdx.x];
        __syncthreads();
    }
    if (row < m && column < n) C[row * n + column] = sum;
}
"""

MANY = """
typedef struct { float low, high; int count; } Range;
__device__ void swap(float& a, float& b) { float t = a; a = b; b = t; }
__device__ float* row_of(float* p, int i) { return p + i * 4; }
__global__ void many(float4* v, float* out, double d, bool yes, long long wide) {
    float4 q = v[threadIdx.x];
    q.w = q.x * 2 + q.y;
    v[threadIdx.x] = make_float4(q.x, q.y, q.z, q.w);
    v[threadIdx.x].z -= 1;
    Range range = {1.5f, 2.5f, 3};
    range.high += range.count;
    swap(out[0], out[1]);
    float acc[4] = {1, 2, 3};
    for (int i = 0; i < 4; i++) out[4 + i] = acc[3 - i];
    float* r = row_of(out, 2);
    *r = d;
    r[1] = (int)-5.9f;
    *(r + 2) = yes ? sqrtf(2.f) : 0.f;
    r[3] = -7 / 2 + (wide >> 40);
    int z = 3;
    out[12] = z++ + ++z;
    out[13] = INFINITY;
    out[14] = __int_as_float(0x3f800000);
    out[15] = range.high;
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(out + 14);
    out[16] = bytes[3];
    switch (z) { case 4: out[17] = -1; break; case 5: out[17] = fmaxf(1.f, 3.f); break; default: out[17] = 0; }
    do { z--; if (z == 2) break; } while (z > 0);
    out[18] = z + abs(-4) + isnan(NAN) + __clz(1);
    out[19] = 7u % 4u + (3 == 3 && !(2 > 3)) + (char)300;
}
"""


def every_function(vendors=True):
    """A kernel that calls every function in the reference page; functions of the vendor's library only if `vendors`."""
    from wooly_cuda_c.printing import builtins
    from wooly_cuda_c.syntax.words import VECTOR_TYPES

    lines = []
    for name, n in builtins.MATH.items() if vendors else ():
        lines.append(f"x[0] += {name}({', '.join(['x[1]'] * n)});")
        lines += [f"d[0] += {name}({', '.join(['d[1]'] * n)});", f"x[0] += {name}f({', '.join(['x[1]'] * n)});"]
    for name in builtins.ALIASES if vendors else ():
        n = builtins.MATH[builtins.ALIASES[name].removesuffix("f")]
        lines.append(f"x[0] += {name}({', '.join(['x[1]'] * n)});")
    lines += [f"i[0] += {name}(x[1]) + {name}(d[1]);" for name in builtins.TESTS]
    lines += [f"i[0] += {n}(i[1], i[2]); x[0] += {n}(x[1], x[2]); u[0] = {n}(u[1], 3u);" for n in builtins.EXTREMES]
    lines += [f"d[0] += {n}(x[1], x[2]);" for n in builtins.OPERATORS]
    lines += [f"d[0] += {n}({', '.join(['x[1]'] * len(a))});" for n, (a, _) in builtins.PLAIN.items()]
    lines += [f"x[0] += {n}(x + 3);" for n in builtins.LOADS]
    arrays = {"i32": "i", "u32": "u", "i64": "l", "u64": "m", "f32": "x", "f64": "d"}
    for n, (what, kinds) in builtins.ATOMICS.items():
        extra = ", 1" if what == "compare" else ""
        lines += [f"{n}(&{arrays[k]}[0], {arrays[k]}[1]{extra});" for k in kinds]
        if what not in ("increase", "decrease"):
            lines += [f"{n}(&s_{arrays[k]}[0], {arrays[k]}[1]{extra});" for k in kinds]
    lines += [f"i[0] += {n}(i[1]);" for n in builtins.BARRIERS[2:]]
    lines += ["__syncthreads();", "__syncwarp();"] + [f"{n}();" for n in builtins.FENCES]
    for n in builtins.WARP:
        if "shfl" in n:
            lines += [f"{a}[0] = {n}(~0u, {a}[1], 1); {a}[0] += {n}(~0u, {a}[1], 1, 8);" for a in arrays.values()]
        else:
            lines.append(f"u[0] += {n}(~0u, i[1]);")
    lines += [f"d[0] += {n};" for n in builtins.NUMBERS]
    lines += [f"d[0] += {p}.x + {p}.y + {p}.z;" for p in builtins.PLACES]
    for n, (_, count) in VECTOR_TYPES.items():
        if n != "dim3":
            lines.append(
                f"{{ {n} v = make_{n}({', '.join('1234'[:count])}); v.y += 1; d[0] += v.x + (({n}*)l)[0].y; }}"
            )
    lines += ["i[0] = abs(i[1]); x[0] = abs(x[1]); assert(i[0] >= 0); if (i[0] < 0) __trap();"]
    shared = " ".join(f"__shared__ {t} s_{a}[4];" for a, t in zip(arrays.values(), _TYPES, strict=True))
    params = ", ".join(f"{t}* {a}" for a, t in zip(arrays.values(), _TYPES, strict=True))
    body = "\n  ".join(lines)
    return f"__global__ void everything({params}) {{\n  {shared}\n  {body}\n}}"


_TYPES = ("int", "unsigned int", "long long", "unsigned long long", "float", "double")
