"""Programs whose kernels are built for chips: parts of models at usual sizes, and a kernel of every kind."""

from wooly_testkit import optimizers
from wooly_testkit.tape import Tape
from wooly_wis.dtypes import DType

F32, BF16, F16, I64, BOOL = DType.F32, DType.BF16, DType.F16, DType.I64, DType.BOOL
#: Rows of a batch, the width of a model, and the number of classes.
ROWS, WIDTH, CLASSES = 4096, 4096, 32000


def norm_gelu_residual(dtype=F32):
    t = Tape()
    x, w, b, z = t.input(dtype, ROWS, WIDTH), t.input(dtype, WIDTH), t.input(dtype, WIDTH), t.input(dtype, ROWS, WIDTH)
    normal, mean, rstd = t.ops("layer_norm", x, (WIDTH,), w, b, 1e-5)
    t.free(mean, rstd)
    g = t.op("gelu", normal)
    t.free(normal)
    t.op("add", g, z)
    t.free(g)
    return t


def rms_norm():
    t = Tape()
    x, w = t.input(BF16, ROWS, WIDTH), t.input(BF16, WIDTH)
    wide = t.copy(x, F32)
    square = t.op("pow", wide, 2)
    mean = t.op("mean", square, (-1,), True)
    t.free(square)
    scale = t.op("rsqrt", t.op("add", mean, 1e-5))
    t.op("mul", w, t.copy(t.op("mul", wide, scale), BF16))
    return t


def rotation():
    t = Tape()
    x, cos, sin = t.input(BF16, 2, 32, 2048, 128), t.input(BF16, 2048, 128), t.input(BF16, 2048, 128)
    low, high = (x.seen((2, 32, 2048, 64), x.view.strides, at) for at in (0, 64))
    turned = t.op("concat", (t.op("neg", high), low), -1)
    t.op("add", t.op("mul", x, cos), t.op("mul", turned, sin))
    return t


def gated():
    t = Tape()
    gate, up = t.input(BF16, ROWS, 11008), t.input(BF16, ROWS, 11008)
    t.op("mul", t.op("silu", gate), up)
    return t


def masked_softmax():
    t = Tape()
    scores, mask = t.input(BF16, 2, 32, 512, 512), t.input(BF16, 2, 1, 512, 512)
    wide = t.copy(t.op("add", t.op("mul", scores, 0.088), mask), F32)
    t.copy(t.op("softmax", wide, -1), BF16)
    return t


def cross_entropy():
    t = Tape()
    x, y = t.input(F32, ROWS, CLASSES), t.input(I64, ROWS)
    p = t.op("log_softmax", x, 1)
    _, total = t.extern("aten.nll_loss_forward.default", p, y, None, 1, -100, results=[(F32, ()), (F32, ())])
    grad = t.input(F32)
    (g,) = t.extern(
        "aten.nll_loss_backward.default", grad, p, y, None, 1, -100, total, results=[(F32, (ROWS, CLASSES))]
    )
    t.op("log_softmax_backward", g, p, 1, F32)
    t.free(g)
    return t


def layer_norm_gradient():
    t = Tape()
    x, g = t.input(F32, ROWS, WIDTH), t.input(F32, ROWS, WIDTH)
    mean, rstd, w, b = t.input(F32, ROWS, 1), t.input(F32, ROWS, 1), t.input(F32, WIDTH), t.input(F32, WIDTH)
    results = [(F32, (ROWS, WIDTH)), (F32, (WIDTH,)), (F32, (WIDTH,))]
    name = "aten.native_layer_norm_backward.default"
    t.extern(name, g, x, (WIDTH,), mean, rstd, w, b, (True, True, True), results=results)
    return t


def sums_of_columns():
    t = Tape()
    t.op("sum", t.input(F32, ROWS, WIDTH), (0,), False)
    return t


def adamw():
    """One step over tensors of several sizes, which one launch computes."""
    t = Tape()
    optimizers.adamw(t, (1_000_000, 247_000, 2_500, 500))
    return t


def embedding():
    t = Tape()
    t.op("embedding", t.input(BF16, CLASSES, WIDTH), t.input(I64, ROWS))
    return t


def greedy_choice():
    t = Tape()
    t.op("argmax", t.input(F32, 8, CLASSES), -1)
    return t


#: Parts of models, as an executor's programs have them.
PARTS = (
    norm_gelu_residual,
    rms_norm,
    rotation,
    gated,
    masked_softmax,
    cross_entropy,
    layer_norm_gradient,
    sums_of_columns,
    adamw,
    embedding,
    greedy_choice,
)


def every_kind():
    """A varied set of kernels: pointwise, folds, mixed types, every function of Wooly's own."""
    t = Tape()
    x, w, b = t.input(F32, 64, 96), t.input(F32, 96), t.input(F32, 96)
    m = t.op("mul", x, w)
    s = t.op("add", m, b)
    y = t.op("gelu", s)
    t.free(m, s)
    n, mean, rstd = t.ops("layer_norm", y, (96,), w, b, 1e-5)
    t.free(mean, rstd)
    t.op("softmax", n, -1)
    h, k = t.input(BF16, 7, 5), t.input(F16, 7, 5)
    hk = t.op("mul", h, k)
    e = t.input(F32, 1000)
    for op in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "erf", "sin", "cos", "floor", "sqrt"):
        e = t.op(op, e)
    i = t.input(I64, 33)
    t.op("lt", t.op("abs", i), t.copy(i, DType.I32))
    t.op("any", t.op("isnan", hk), (1,))
    w, i, j = t.input(F32, 50, 32), t.input(I64, 12), t.input(I64, 12)
    picked = t.op("embedding", w, i)
    t.op("argmax", t.op("tril", picked, 1), 1)
    t.op("remainder", i, j)
    t.ops("concat", (picked, t.op("neg", picked)), 1)
    columns = t.input(F32, 300, 32)
    t.op("softmax", columns, 0)
    t.op("argmin", columns, 0)
    t.extern("aten.nll_loss_forward.default", columns, t.input(I64, 300), None, 1, 5, results=[(F32, ()), (F32, ())])
    for n in (5000, 64, 3):
        p, g = t.input(F32, n), t.input(F32, n)
        t.op("add", p, g, -0.1, into=p)
    return t


def vendors_functions():
    """Kernels with functions of the vendor's. AMD's are in a library that only the device's machine has."""
    t = Tape()
    t.op("pow", t.input(DType.F64, 9), 2.5)
    t.op("div_floor", t.input(F32, 9), 3.5)
    t.op("atan2", t.input(F32, 7), t.input(F32, 7))
    return t
