"""Random layers on the device and on the CPU: results, gradients and trained parameters must have the same bits and strides.

`modules.py` has PyTorch's own samples, whose tensors are contiguous and whose parameters all need gradients. Here, the layouts of
inputs and gradients, the dtype, frozen parameters, the mode and the number of steps are drawn, too.

Left out is what PyTorch computes otherwise on CUDA than on a CPU: attention in float64, gradients of group norms of channels-last
tensors, `grid_sample` in half precision, and random layers.

Run: python layers.py --seeds 0:1000 [--minutes 5]
It starts an executor. The last line tells how many layers were compared and how many differ.
"""

import argparse
import copy
import random
import sys
import time

import torch
from comparison import compare, to
from torch import nn

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
OPTIMIZERS = (
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    lambda p: torch.optim.RMSprop(p, foreach=False),
)


class Call(nn.Module):
    """A function as a layer. `parts`: modules that are its first arguments."""

    def __init__(self, function, *parts):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *args):
        return self.function(*self.parts, *args)


def channels(draw):
    return draw.choice((1, 2, 3, 4, 6, 8, 16, 17, 32))


def convolution(draw):
    dims, transposed = draw.choice((1, 2, 2, 3)), draw.random() < 0.35
    groups, given = draw.choice((1, 1, 1, 2, 4)), channels(draw)
    depthwise = draw.random() < 0.2
    groups = given if depthwise else groups
    into = -(-given // groups) * groups
    out = into * draw.choice((1, 2)) if depthwise else -(-channels(draw) // groups) * groups
    kernel, stride, dilation, padding = [
        tuple([draw.choice(of) for _ in range(dims)]) for of in ((1, 2, 3, 5), (1, 1, 2, 3), (1, 1, 2), (0, 1, 2))
    ]
    how = {"stride": stride, "dilation": dilation, "padding": padding, "groups": groups, "bias": draw.random() < 0.7}
    if transposed:
        more = tuple([draw.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)])
        layer = getattr(nn, f"ConvTranspose{dims}d")(into, out, kernel, output_padding=more, **how)
    else:
        how["padding_mode"] = draw.choice(("zeros", "zeros", "reflect", "replicate", "circular"))
        layer = getattr(nn, f"Conv{dims}d")(into, out, kernel, **how)
    sizes = [draw.randint(max(3, (k - 1) * d + 1), 9 + 9 // dims) for k, d in zip(kernel, dilation, strict=True)]
    return layer, (torch.randn(draw.choice((1, 2, 3, 5)), into, *sizes),)


def pooling(draw):
    dims, kind = draw.choice((1, 2, 3)), draw.choice(("Max", "Avg", "AdaptiveAvg", "AdaptiveMax", "LP"))
    x = torch.randn(draw.choice((1, 2, 3)), channels(draw), *[draw.randint(6, 13) for _ in range(dims)])
    window = {"kernel_size": draw.choice((2, 3)), "stride": draw.choice((None, 1, 2)), "ceil_mode": draw.random() < 0.3}
    make = getattr(nn, f"{kind}Pool{dims}d")
    if kind in ("Max", "Avg"):
        return make(padding=draw.choice((0, 1)), **window), (x,)
    if kind == "LP":
        return make(2.0, **window), (x,)
    return make(draw.choice((1, 2, 3, 5))), (x,)


def normalisation(draw):
    dims, width = draw.choice((1, 2, 3)), draw.choice((2, 4, 6, 8, 16))
    x, affine = (
        torch.randn(draw.choice((2, 3, 4)), width, *[draw.randint(2, 7) for _ in range(dims)]),
        draw.random() < 0.8,
    )
    last = list(x.shape[-draw.randint(1, dims) :])
    momentum, tracks = draw.choice((0.1, None, 0.3)), draw.random() < 0.8
    return draw.choice(
        (
            getattr(nn, f"BatchNorm{dims}d")(width, momentum=momentum, affine=affine, track_running_stats=tracks),
            getattr(nn, f"InstanceNorm{dims}d")(width, affine=affine, track_running_stats=not tracks),
            nn.LayerNorm(last, elementwise_affine=affine, bias=tracks),
            nn.RMSNorm(last, elementwise_affine=affine),
        )
    ), (x,)


def attention(draw):
    batch, heads, queries, width = draw.choice((1, 2, 3)), draw.choice((1, 2, 4)), draw.choice((1, 2, 5, 33)), 8
    keys, few = draw.choice((queries, 7, 40)), draw.choice((heads, 1))
    q = torch.randn(batch, heads, queries, width)
    k, v = torch.randn(batch, few, keys, width), torch.randn(batch, few, keys, draw.choice((width, 12)))
    how = {"enable_gqa": few != heads, "scale": draw.choice((None, 0.4))}
    mask = draw.choice((None, torch.rand(queries, keys) > 0.3, torch.randn(batch, 1, queries, keys)))
    if mask is None:
        how["is_causal"] = draw.random() < 0.5
        return Call(lambda *qkv: nn.functional.scaled_dot_product_attention(*qkv, **how)), (q, k, v)
    return Call(lambda *qkv: nn.functional.scaled_dot_product_attention(*qkv, **how)), (q, k, v, mask)


def transformer(draw):
    make = draw.choice((nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
    layer = make(
        16, draw.choice((1, 2)), 24, dropout=0.0, activation=draw.choice(("relu", "gelu")),
        batch_first=draw.random() < 0.6, norm_first=draw.random() < 0.5,
    )  # fmt: skip
    x = torch.randn(2, 5, 16)
    return layer, (x,) if make is nn.TransformerEncoderLayer else (x, torch.randn(2, 5, 16))


def recurrent(draw):
    kind = draw.choice((nn.LSTM, nn.GRU, nn.RNN))
    layer = kind(
        3, 6, num_layers=draw.choice((1, 2)), bidirectional=draw.random() < 0.4, bias=draw.random() < 0.8,
        batch_first=draw.random() < 0.5,
    )  # fmt: skip
    return Call(lambda part, x: part(x)[0], layer), (torch.randn(draw.choice((1, 3, 4)), draw.choice((1, 5)), 3),)


def embedding(draw):
    rows, ids = 12, torch.randint(0, 12, (draw.choice((1, 3, 7)), draw.choice((1, 4))))
    padding = draw.choice((None, 0))
    if draw.random() < 0.5:
        return nn.Embedding(rows, 5, padding_idx=padding, max_norm=draw.choice((None, 1.0))), (ids,)
    return nn.EmbeddingBag(rows, 5, mode=draw.choice(("sum", "mean", "max")), padding_idx=padding), (ids,)


def resampling(draw):
    dims = draw.choice((1, 2, 3))
    x = torch.randn(2, channels(draw), *[draw.randint(2, 7) for _ in range(dims)])
    mode = draw.choice(
        ("nearest", "nearest-exact", ("linear", draw.choice(("bilinear", "bicubic")), "trilinear")[dims - 1])
    )
    how = {} if mode.startswith("nearest") else {"align_corners": draw.random() < 0.5}
    factor = draw.choice((0.5, 2, 1.7))
    return Call(lambda x: nn.functional.interpolate(x, scale_factor=factor, mode=mode, **how)), (x,)


def padding(draw):
    dims, mode = draw.choice((1, 2, 3)), draw.choice(("constant", "reflect", "replicate", "circular"))
    sizes = [draw.randint(0, 2) for _ in range(2 * dims)]
    x = torch.randn(2, 3, *[draw.randint(3, 6) for _ in range(dims)])
    return Call(lambda x: nn.functional.pad(x, sizes, mode=mode)), (x,)


def activation(draw):
    # not `LogSigmoid`: the CPU's result is contiguous, that of CUDA has the strides of the input
    layer = draw.choice(
        (
            *(
                nn.ELU(),
                nn.SELU(),
                nn.GELU(),
                nn.GELU("tanh"),
                nn.SiLU(),
                nn.Mish(),
                nn.Hardswish(),
                nn.Softplus(2.0, 3.0),
            ),
            *(
                nn.Hardshrink(),
                nn.Softsign(),
                nn.LeakyReLU(0.1),
                nn.Threshold(0.1, 0.5),
                nn.PReLU(),
                nn.GLU(),
            ),
            *(nn.Softmax(1), nn.LogSoftmax(0)),
        )
    )
    return layer, (torch.randn(draw.choice(((4, 8), (3, 4, 6), (2, 3, 4, 6), (33, 18)))),)


def product(draw):
    into = channels(draw)
    if draw.random() < 0.5:
        shape = draw.choice(((into,), (3, into), (2, 5, into), (0, into)))
        return nn.Linear(into, channels(draw), bias=draw.random() < 0.7), (torch.randn(shape),)
    what, *shapes = draw.choice(
        (
            ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
            ("bhqd,bhkd->bhqk", (2, 2, 3, 4), (2, 2, 5, 4)),
            ("...i,...i->...", (3, 4, 5), (3, 4, 5)),
            ("abc,cd,ae->bde", (2, 3, 4), (4, 5), (2, 6)),
        )
    )
    return Call(lambda *factors: torch.einsum(what, *factors)), tuple([torch.randn(s) for s in shapes])


def loss(draw):
    how, x, y = {"reduction": draw.choice(("mean", "sum", "none"))}, torch.randn(8, 5), torch.randn(8, 5)
    classes = torch.randint(0, 5, (8,))
    return draw.choice(
        (
            (nn.L1Loss(**how), (x, y)),
            (nn.MSELoss(**how), (x, y)),
            (nn.HuberLoss(delta=0.7, **how), (x, y)),
            (nn.SmoothL1Loss(beta=0.5, **how), (x, y)),
            (nn.BCEWithLogitsLoss(**how), (x, torch.rand(8, 5))),
            (nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=1, **how), (x, classes)),
            (nn.CrossEntropyLoss(weight=torch.rand(5), **how), (x, classes)),
            (nn.KLDivLoss(reduction=draw.choice(("batchmean", "sum", "none"))), (x.log_softmax(1), y.softmax(1))),
            (nn.SoftMarginLoss(**how), (x, y.sign())),
            (nn.TripletMarginLoss(**how), (x, y, torch.randn(8, 5))),
        )
    )


FAMILIES = (
    *(convolution, convolution, convolution, pooling, normalisation, normalisation, attention, transformer, recurrent),
    *(embedding, resampling, padding, activation, product, loss),
)
#: Families whose float64 is computed in another way on CUDA.
NOT_DOUBLE = (attention, transformer)


def laid_out(draw, t):
    """The values of a tensor, or some of them, in a layout that scripts make."""
    how = draw.choice(("", "", "", "channels last", "permuted", "every other", "part", "expanded", "flipped"))
    if how == "channels last" and t.dim() in FORMATS:
        return t.contiguous(memory_format=FORMATS[t.dim()])
    if how == "permuted" and t.dim() > 2:
        order = draw.sample(range(t.dim()), t.dim())
        return t.permute(order).contiguous().permute([order.index(d) for d in range(t.dim())])
    if how in ("every other", "part") and t.dim() > 1:
        twice = torch.cat([t, t], -1)
        return twice[..., ::2] if how == "every other" else twice[..., : t.shape[-1]]
    if how == "expanded" and t.dim() and t.shape[0] > 1:
        return t[:1].expand_as(t)
    return t.flip(0) if how == "flipped" and t.dim() > 1 else t


class Case:
    """A layer, its inputs, and how it is trained. A seed always gives the same case."""

    def __init__(self, seed):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        family = draw.choice(FAMILIES)
        self.layer, inputs = family(draw)
        others = (
            (torch.bfloat16, torch.float16) if family in NOT_DOUBLE else (torch.float64, torch.bfloat16, torch.float16)
        )
        dtype = draw.choice((*[torch.float32] * 5, *others))
        dilation = getattr(self.layer, "dilation", ())
        if dtype == torch.bfloat16 and isinstance(dilation, tuple) and max(dilation, default=1) > 1:
            dtype = torch.float32  # the CPU's gradient may be wrong, and then Wooly's is another one
        self.layer.to(dtype)
        self.inputs = [laid_out(draw, t.to(dtype)) if t.is_floating_point() else t for t in inputs]
        if draw.random() < 0.25 and any(p.dim() == 4 for p in self.layer.parameters()):
            self.layer.to(memory_format=torch.channels_last)
        self.layer.train(draw.random() < 0.75)
        self.trains, frozen = draw.random() < 0.75, draw.random() < 0.25
        self.wants = [draw.random() < 0.85 for _ in self.inputs]
        for parameter in self.layer.parameters():
            parameter.requires_grad_(not frozen or draw.random() < 0.5)
        self.steps, self.optimizer, self.seed = draw.choice((1, 1, 2, 3)), draw.choice(OPTIMIZERS), seed

    def __str__(self):
        inputs = ", ".join([f"{tuple(t.shape)} with strides {t.stride()}" for t in self.inputs])
        return f"{self.layer} {self.inputs[0].dtype} on {inputs}, {'training' if self.layer.training else 'eval'}"

    def run(self, device):
        """What a script sees, by name."""
        layer, draw = copy.deepcopy(self.layer).to(device), random.Random(self.seed)
        inputs = [
            to(t, device).detach().requires_grad_(self.trains and want and t.is_floating_point())
            for t, want in zip(self.inputs, self.wants, strict=True)
        ]
        trained, seen, optimizer = [p for p in layer.parameters() if p.requires_grad], [], None
        for step in range(self.steps):
            with torch.set_grad_enabled(self.trains):
                result = layer(*inputs)
            seen.append((f"result {step}", result))
            if not result.requires_grad:
                continue
            torch.manual_seed(self.seed + step)
            gradient = laid_out(draw, torch.randn(result.shape, dtype=torch.float64).to(result.dtype))
            result.backward(to(gradient, device))
            seen += [(f"gradient {n} {step}", t.grad) for n, t in enumerate((*inputs, *trained)) if t.grad is not None]
            if trained:
                optimizer = optimizer or self.optimizer(trained)
                optimizer.step()
                optimizer.zero_grad()
            for t in inputs:
                t.grad = None
        return [(name, t.detach().to("cpu")) for name, t in (*seen, *layer.state_dict().items())]


def compared(seed):
    """Compare the layer of a seed. Returns what differs; empty: nothing; None: the CPU refuses it."""
    case = Case(seed)
    try:
        expected = case.run("cpu")
    except (NotImplementedError, RuntimeError, ValueError):
        return None
    try:
        found = case.run("cuda")
    except Exception as e:  # whatever a script would see
        return f"seed {seed}: {case}: {type(e).__name__}: {e}"
    if [name for name, _ in expected] != [name for name, _ in found]:
        return f"seed {seed}: {case}: other results"
    pairs = zip(expected, found, strict=True)
    differ = [name for (name, theirs), (_, ours) in pairs if compare(ours, theirs)[0] != "pass"]
    return f"seed {seed}: {case}: {', '.join(differ)}" if differ else ""


def main():
    from wooly import api
    from wooly_testkit.executor import executor_process

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:1000", help="FIRST:LAST")
    parser.add_argument("--minutes", type=float, default=5)
    given = parser.parse_args()
    until, number, differ = time.monotonic() + given.minutes * 60, 0, 0
    torch.set_num_threads(1)
    with executor_process(threads=1) as running:
        api.attach(running.endpoints, running.session_id, running.token)
        api.install_facade()
        for seed in range(*map(int, given.seeds.split(":"))):
            if time.monotonic() > until:
                break
            said = compared(seed)
            number += said is not None
            if said:
                differ += 1
                print(said, flush=True)
        api.disable()
    print(f"{number} layers, {differ} differ")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
