"""Steps of random programs: what a program does next, for the tensors that it has.

A `Maker` runs each step on the CPU as soon as it has chosen it, so it knows the tensors that the next step can use. A step is a
line of Python (or a block with steps in it), and a program is a list of steps. The names in a step are those of `program_names`,
of tensors on the device (t1, t2, …) and on the host (h1, …), of modules and their optimizers (m1, o1, …).

Some rules keep programs within what the CPU and CUDA both define, each where it applies: an index occurs once in a write, and so
does an element of the written tensor; values come from the CPU's generator; sorts are stable; mixed precision has the operators
that both lists of casts have.
"""

import random

import torch

FLOATS = ("float32", "float32", "float32", "float64", "float16", "bfloat16")
WHOLE = ("int64", "int64", "int32", "int16", "int8", "uint8")
SHAPES = (
    *((), (1,), (3,), (4,), (5,), (33,), (2, 3), (3, 4), (4, 3), (1, 4), (4, 4), (4, 4), (17, 5), (0,), (0, 3)),
    *((2, 3, 4), (2, 1, 3), (3, 4, 4), (2, 2, 3, 2)),
)
#: The most elements of a tensor, and the most tensors at a time.
ELEMENTS, TENSORS = 600, 11
#: Functions of one tensor whose results stay small, so that loops do not end in infinities.
BOUNDED = (
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "atan",
    "erf",
    "sign",
    "frac",
    "abs",
    "neg",
    "floor",
    "round",
    "trunc",
    "relu",
)
FLOAT_ONLY = (
    "exp",
    "log1p",
    "sqrt",
    "rsqrt",
    "exp2",
    "expm1",
    "log",
    "lgamma",
    "asinh",
    "softmax",
    "log_softmax",
    "square",
)
INTEGER = ("abs", "neg", "square", "sign", "bitwise_not", "float", "double", "bool", "long", "half")


def shares_elements(t):
    """Whether elements of a tensor share memory in a way that PyTorch does not see, as those of `unfold`."""
    return t.numel() > 1 + sum([(n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)]) and 0 not in t.stride()


def is_result(t, unknown=False):
    """Whether a function made a tensor that needs a gradient; `unknown` for a view whose base was changed in spite of a rule."""
    try:
        return t.requires_grad and t.grad_fn is not None
    except RuntimeError:
        return unknown


class Maker:
    """Makes the steps of one program.

    Args:
        seed: the program's number.
        run: executes a step on the CPU; returns whether it raised.
        space: the names of the run.
    """

    def __init__(self, seed, run, space):
        self.rng = random.Random(seed)
        self._run, self.space = run, space
        self.steps = []
        self._numbers = {"t": 0, "h": 0, "m": 0, "g": 0}
        self._depth = 0
        self._capturing = False
        self._shapes, self._made = {}, {}
        self._seed = seed * 1000

    # -- what there is ------------------------------------------------------------------------------------------------

    def names(self, kind="t", wanted=lambda t: True):
        return [
            n
            for n, v in self.space.items()
            if n[0] == kind and n[1:].isdigit() and (not isinstance(v, torch.Tensor) or wanted(v))
        ]

    def pick(self, wanted=lambda t: True):
        """The name of a tensor, rather a new one; makes one if there is none."""
        found = self.names("t", wanted)
        if not found:
            return None
        return found[-1] if self.rng.random() < 0.3 else self.rng.choice(found)

    def get(self, name):
        return self.space[name]

    def new(self, kind="t"):
        """A name for a result: a new one, or one that is there and loses its tensor."""
        here = self.names(kind)
        if kind == "t" and here and not self._capturing and (len(here) >= TENSORS or self.rng.random() < 0.1):
            return self.rng.choice(here)
        self._numbers[kind] += 1
        return f"{kind}{self._numbers[kind]}"

    def seed(self):
        self._seed += 1
        if self._depth and self.rng.random() < 0.6:
            return f"{self._seed} + k"
        return str(self._seed)

    def values(self, shape, dtype):
        """The expression of a tensor with new values."""
        sizes = "".join([f", {n}" for n in shape])
        kind = "" if dtype == "float32" else f", dtype=torch.{dtype}"
        return f"R({self.seed()}{sizes}{kind})"

    def dtype(self):
        kinds = (FLOATS, FLOATS, WHOLE, ("bool",), ("complex64",))
        return self.rng.choice(self.rng.choice(kinds))

    def number(self):
        """A number that all dtypes hold: a fill with another one is an error, which may come late."""
        return self.rng.choice(("0", "1", "2", "-1", "3", "0.5", "1.5", "True", "1e-3", "7"))

    # -- a program ----------------------------------------------------------------------------------------------------

    def program(self, count):
        for _ in range(4):
            self.step(self.factory())
        while len(self.steps) < count:
            self.any_step(self.steps)
        return self.steps

    def any_step(self, steps):
        kinds, weights = zip(*(BLOCKS + STEPS if self._depth < 2 else STEPS), strict=True)
        kind = Maker.captured if self._capturing else self.rng.choices(kinds, weights)[0]
        made = kind(self)
        if made is None:
            return
        if isinstance(made, list):
            self.block(made, steps)
        else:
            self.step(made, steps)
        big = self.names("t", lambda t: t.numel() > ELEMENTS)
        for name in big:
            self.step(f"del {name}", steps)

    def step(self, line, steps=None):
        failed = self._run(line)
        if failed and (self.rng.random() < 0.75 or "out=" in line):
            return  # most errors are mistakes of these functions; what a tensor for a result is after an error is not promised
        (self.steps if steps is None else steps).append(line)

    def block(self, made, steps):
        """A block: its head, the number of its steps and how often they run."""
        head, count, times = made
        inner = []
        self._depth += 1
        self.space["k"] = 0
        self._capturing = "graph(" in head
        for _ in range(count * 3):
            if len(inner) < count:
                self.any_step(inner)
        self._depth -= 1
        self._capturing = False
        if inner:
            block = [head, inner]
            if times > 1:
                self._run(block)
            steps.append(block)

    # -- makers of steps ----------------------------------------------------------------------------------------------

    def factory(self):
        rng, shape, dtype = self.rng, self.rng.choice(SHAPES), self.dtype()
        way = rng.randrange(10)
        if way < 5:
            made = self.values(shape, dtype)
        elif way == 5:
            make = rng.choice(("zeros", "ones", "empty"))
            made = f"torch.{make}({shape}, dtype=torch.{dtype}, device=D)" + (".fill_(2)" if make == "empty" else "")
        elif way == 6:
            made = f"torch.arange({rng.randrange(3)}, {rng.randrange(4, 24)}, device=D)"
        elif way == 7:
            made = f"torch.full({shape}, {self.number()}, dtype=torch.{dtype}, device=D)"
        elif way == 8:
            made = (
                f"torch.tensor({rng.choice(('[1, 2, 3]', '[[1.5, 2], [3, 4]]', '2.5', '7', 'True', '[]'))}, device=D)"
            )
        else:
            other = self.pick()
            if other is None:
                return f"{self.new()} = torch.eye(4, device=D)"
            made = rng.choice(
                (
                    f"torch.zeros_like({other})",
                    f"{other}.new_full({shape}, 3)",
                    f"torch.ones_like({other}, dtype=torch.{dtype})",
                )
            )
        return f"{self.new()} = {made}"

    def unary(self):
        name = self.pick()
        if name is None:
            return None
        t = self.get(name)
        if t.dtype is torch.bool:
            op = self.rng.choice(("logical_not", "float", "long", "int", "bitwise_not"))
        elif t.is_complex():
            op = self.rng.choice(("abs", "conj", "real", "imag", "neg", "square", "angle", "sgn", "resolve_conj"))
        elif t.is_floating_point():
            op = self.rng.choice(BOUNDED + BOUNDED + FLOAT_ONLY)
        else:
            op = self.rng.choice(INTEGER)
        extra = "-1" if op.endswith("softmax") else ""
        return f"{self.new()} = {name}.{op}({extra})"

    def _two(self):
        """Two tensors that can be broadcast."""
        a = self.pick()
        if a is None:
            return None, None
        shape = self.get(a).shape

        def fits(t):
            try:
                return len(torch.broadcast_shapes(shape, t.shape)) <= 4
            except RuntimeError:
                return False

        return a, self.pick(fits) or a

    def binary(self):
        a, b = self._two()
        if a is None:
            return None
        rng = self.rng
        way = rng.randrange(8)
        whole = not (self.get(a).is_floating_point() or self.get(a).is_complex())
        op = rng.choice(("+", "-", "*", "+", "*", "/", "==", "<", ">=", "!="))
        if way == 0:
            other = self.number()
            made = f"{other} {op} {a}" if rng.random() < 0.4 else f"{a} {op} {other}"
        elif way == 1:
            op = rng.choice(
                ("maximum", "minimum", "fmod", "remainder", "atan2", "copysign", "logical_and", "eq", "sub", "add")
            )
            made = f"torch.{op}({a}, {b})"
        elif way == 2:
            alpha = rng.choice(("2", "3", "-1", f"{a}.detach().float().mean()", f"{b}.detach().double().max()"))
            made = f"torch.{rng.choice(('add', 'sub'))}({a}, {b}, alpha={alpha})"
            if "mean" in alpha or "max" in alpha:
                return f"with torch.no_grad(): {self.new()} = {made}"
        elif way == 3:
            made = f"torch.where({a} > {self.number()}, {a}, {b})"
        elif way == 4 and whole:
            made = f"{a} {rng.choice(('&', '|', '^', '//', '%', '<<'))} {rng.choice((b, '3'))}"
        elif way == 4:
            made = f"torch.addcmul({a}, {b}, {rng.choice((a, b))}, value=0.5)"
        elif way == 5:
            made = f"torch.lerp({a}, {b}, 0.25)"
        elif way == 6:
            hosts = [
                f"{h}.flatten()[0]" for h in self.names("h")
            ]  # a number on the host fits to tensors of all devices
            made = f"{a} {op} {rng.choice(hosts)}" if hosts else f"{a} {op} torch.tensor(1.5)"
        else:
            made = f"{a} {op} {b}"
        return f"{self.new()} = {made}"

    def clamp(self):
        name = self.pick(lambda t: not t.is_complex() and t.dtype is not torch.bool)
        return (
            name and f"{self.new()} = {name}.clamp({self.rng.choice(('-1', '0', 'None'))}, {self.rng.choice((1, 2))})"
        )

    def matmul(self):
        a = self.pick(lambda t: t.dim() >= 1 and t.is_floating_point())
        if a is None:
            return None
        t = self.get(a)
        b = self.pick(
            lambda u: u.dtype is t.dtype and u.dim() >= 1 and u.shape[-2 if u.dim() > 1 else -1] == t.shape[-1]
        )
        if b is None:
            return f"{self.new()} = {a} @ {self.values((t.shape[-1], 3), str(t.dtype)[6:])}"
        return f"{self.new()} = {a} @ {b}"

    def reduction(self):
        name = self.pick(lambda t: t.numel() > 0)
        if name is None:
            return None
        t, rng = self.get(name), self.rng
        ops = ["sum", "sum", "prod", "any", "all", "count_nonzero", "cumsum"]
        if t.is_floating_point():
            ops += [
                "mean",
                "var",
                "std",
                "logsumexp",
                "norm",
                "amax",
                "amin",
                "argmax",
                "cumprod",
                "sort",
                "median",
                "max",
                "cummax",
            ]
            ops += ["topk"]
        elif not t.is_complex() and t.dtype is not torch.bool:
            ops += ["amax", "amin", "argmin", "sort", "max", "min", "cumprod"]
        op = rng.choice(ops)
        if t.dim() == 0:
            return f"{self.new()} = {name}.{rng.choice(('sum', 'prod', 'any'))}()"
        dim = rng.randrange(-t.dim(), t.dim())
        if op in ("cumsum", "cumprod", "logsumexp"):
            return f"{self.new()} = {name}.{op}({dim})"
        if op == "sort":
            return f"{self.new()}, {self.new()} = {name}.sort({dim}, stable=True, descending={rng.random() < 0.5})"
        if op == "topk":
            return f"{self.new()} = {name}.topk(1, {dim}).values"
        if op == "median" and 0 in t.stride():
            return None  # the CPU's kernel reads other memory
        if op in ("max", "min", "median", "cummax") and rng.random() < 0.5:
            return f"{self.new()} = {name}.{op}({dim}).values"
        if op == "cummax":
            return None
        if op in ("norm", "count_nonzero") or rng.random() < 0.4:
            # Of zeros with different signs, the largest is any of them.
            return f"{self.new()} = {name}.{op}(){' + 0' * (op in ('max', 'min', 'amax', 'amin'))}"
        keep = "" if op in ("max", "min", "median") else f", keepdim={rng.random() < 0.5}"
        return f"{self.new()} = {name}.{op}({dim}{keep})" + (".values" if op in ("max", "min", "median") else "")

    def view_of(self, name):
        """The expression of a view."""
        t, rng = self.get(name), self.rng
        ways = ["[None]", ".detach()", ".reshape(-1)", ".view(-1)", ".view_as({0})", ".alias()", "[...]", ".squeeze()"]
        ways = [w for w in ways if w != ".alias()"]
        if t.is_complex():
            ways += [".real", ".imag", "view_as_real", ".conj()"] * 2
        elif t.is_floating_point():
            same = {2: ("int16", "bfloat16", "float16"), 4: ("int32", "float32"), 8: ("int64", "float64")}[
                t.element_size()
            ]
            ways += [f".view(torch.{rng.choice(same)})", ".view(torch.uint8)"]
        elif t.dtype is torch.uint8:
            ways += [".view(torch.int8)", ".view(torch.bool)" if t.numel() and t.max() < 2 else ".view(torch.int8)"]
        if t.dim():
            d = rng.randrange(t.dim())
            n = t.shape[d]
            ways += [f".unsqueeze({d})", f".flatten({d})", f".expand(2, *{name}.shape)"]
            if n:
                i = rng.randrange(n)
                j = rng.randrange(i, n) + 1
                ways += [f".select({d}, {i})", f".narrow({d}, {i}, {j - i})", f".split({max(1, n // 2)}, {d})[-1]"] * 2
                index = [":"] * d + [rng.choice((f"{i}:{j}", f"{i}::2", str(i), f"-{n - i}:"))]
                ways += [f"[{', '.join(index)}]"] * 4
                ways += [f".unfold({d}, {min(n, 2)}, 1)", f".unbind({d})[{i}]", f".chunk(2, {d})[0]"]
                size = [n if e != d else 1 for e, n in enumerate(t.shape)]
                ways += [f".as_strided({tuple(size)}, {t.stride()}, {name}.storage_offset() + {i * t.stride(d)})"]
        if t.dim() > 1:
            ways += [
                ".transpose(0, -1)",
                ".mT",
                ".movedim(0, -1)",
                f".permute({', '.join(map(str, rng.sample(range(t.dim()), t.dim())))})",
            ] * 2
            ways += [".diagonal()", ".diagonal(1)", ".flatten(0, 1)", ".view(-1)"]
        way = rng.choice(ways).replace("{0}", name)
        return f"torch.view_as_real({name})" if way == "view_as_real" else f"{name}{way}"

    def view(self):
        name = self.pick()
        return name and f"{self.new()} = {self.view_of(name)}"

    def copy(self):
        name, rng = self.pick(), self.rng
        if name is None:
            return None
        other = self.pick() or name
        return f"{self.new()} = " + rng.choice(
            (
                f"{name}.clone()",
                f"{name}.contiguous()",
                f"{name}.to(torch.{rng.choice(('float32', 'float64', 'int64', 'float16', 'bfloat16'))}, copy=True)",
                f"{name}.to({other}.dtype)",
                f"{name}.flip(0)" if self.get(name).dim() else f"{name}.clone()",
                f"{name}.roll(1)",
                f"torch.tril({name})" if self.get(name).dim() > 1 else f"{name}.clone()",
                f"{name}.nan_to_num()",
                f"passed({name}, {rng.choice(('deepcopy', 'save', 'map', 'deepcopy'))!r})",
                f"{name}.repeat(2, *[1] * ({name}.dim() - 1))" if self.get(name).dim() else f"{name}.repeat(2)",
            )
        )

    def join(self):
        name = self.pick(lambda t: t.dim() > 0)
        if name is None:
            return None
        t = self.get(name)
        others = self.names("t", lambda u: u.shape == t.shape)
        parts = ", ".join([self.rng.choice((*others, name)) for _ in range(self.rng.randrange(1, 4))])
        if self.rng.random() < 0.4:
            return f"{self.new()} = torch.stack([{parts}], {self.rng.randrange(t.dim() + 1)})"
        d = self.rng.randrange(t.dim())
        return f"{self.new()} = torch.cat([{parts}, {name}.narrow({d}, 0, {min(1, t.shape[d])})], {d})"

    def index(self):
        name = self.pick(lambda t: t.dim() > 0 and t.shape[0] > 0)
        if name is None:
            return None
        t, rng = self.get(name), self.rng
        n = t.shape[0]
        chosen = f"order({self.seed()}, {n})[:{rng.randrange(1, n + 1)}]"
        return f"{self.new()} = " + rng.choice(
            (
                f"{name}[{chosen}]",
                f"{name}[[{rng.randrange(n)}, -1]]",
                f"{name}.index_select(0, {chosen})",
                f"{name}.gather(0, order({self.seed()}, {n}).reshape(-1, *[1] * {t.dim() - 1}).expand_as({name}))",
                f"torch.take({name}, order({self.seed()}, {t.numel()}))",
                f"{name}[{name} > 0]" if not t.is_complex() else f"{name}[0]",
                f"{name}.masked_select({name} != 0)",
                f"{name}.nonzero()",
                f"torch.unique({name})" if not t.is_complex() else f"{name}[-1]",
                f"torch.unique({name}, return_counts=True)[1]" if not t.is_complex() else f"{name}[-1]",
                f"torch.where({name} != 0)[0]",
                f"torch.argwhere({name} == {name})",
                f"{name}[torch.tensor([True] + [False] * {n - 1}, device=D)]",
                f"{name}[torch.tensor([0, {n - 1}])]",
            )
        )

    def write(self):
        """A write in place, to a tensor or to a view that is made for it."""
        name, rng = self.pick(lambda t: not shares_elements(t)), self.rng
        if name is None:
            return None
        target = self.view_of(name) if rng.random() < 0.45 else name
        if ".unfold(" in target:
            target = name
        t = self.get(name)
        _, other = self._two()
        other = rng.choice((other, self.number(), self.number(), f"{name}.clone()", name))
        # A CPU fills with a number in a tensor, and a fill gives gradients to tensors of integers and booleans, too.
        real = not t.is_complex()
        value = f"{other}.detach()" if other[0] == "t" and real and not t.is_floating_point() else other
        numbers = t.dtype is not torch.bool
        ways = [
            f"{target}.fill_({self.number()})",
            f"{target}.zero_()",
            f"{target}.copy_({other})",
            f"{name}[...] = {value}",
        ]
        if numbers:
            ways += [
                f"{target}.add_({other})",
                f"{target}.mul_({other})",
                f"{target}.sub_({other})",
                f"{target}.neg_()",
            ] * 2
            ways += [f"{name} {rng.choice(('+=', '-=', '*='))} {other}"]
            if t.is_floating_point():
                ways += [f"{target}.{rng.choice(('sin', 'tanh', 'sigmoid', 'round', 'relu', 'cos'))}_()"] * 3
                ways += [
                    f"{target}.div_(3)",
                    f"{target}.lerp_({name}.sin(), 0.5)",
                    f"{target}.addcmul_({name}.cos(), {name}.sin())",
                ]
                ways += [f"{target}.nan_to_num_()", f"{name}.clamp_(-3, 3)", f"{name}.clamp_(-3, 3)"]
            elif real:
                ways += [f"{target}.bitwise_xor_(5)", f"{target}.remainder_(7)", f"{target}.floor_divide_(2)"]
        ways += [
            f"{name}.masked_fill_({name} == {self.number()}, {self.number()})",
            f"{name}[{name} != 1] = {self.number()}",
        ]
        if t.dim() and t.shape[0]:
            n = t.shape[0]
            ids = f"order({self.seed()}, {n})[:{rng.randrange(1, n + 1)}]"
            ways += [f"{name}.index_fill_(0, {ids}, 2)", f"{name}[{ids}] = {self.number()}"]
            ways += [f"{name}[{rng.randrange(n)}] = {self.number()}", f"{name}.index_put_(({ids},), {name}[0].clone())"]
            ways += [f"{name}[{rng.randrange(n)}:] = {name}[0].clone()"]
            if numbers:
                ways += [f"{name}.index_add_(0, torch.zeros({n}, dtype=torch.int64, device=D), {name}.clone())"]
                ways += [
                    f"{name}.index_put_((torch.tensor([0, {n - 1}], device=D),), {name}[0].clone(), accumulate=True)"
                ]
                where = f"torch.zeros_like({name}, dtype=torch.int64)"
                ways += [f"{name}.scatter_add_(0, {where}, {name}.clone())"]
                if real:
                    ways += [f"{name}.scatter_reduce_(0, {where}, {name}.clone(), 'amax')", f"{name}.cumsum_(0)"]
            ways += [f"{name}.scatter_(0, torch.zeros_like({name}[:1], dtype=torch.int64), {self.number()})"]
            ways += [f"{name}.index_copy_(0, {ids}, {name}[:1].clone().expand({name}.index_select(0, {ids}).shape))"]
        if t.dim() > 1:
            if 0 not in t.stride():  # CUDA does not say what it writes where elements share memory
                ways += [f"{name}.tril_()"]
            ways += [f"{name}.transpose_(0, 1)", f"{name}.t_()", f"{name}.squeeze_()", f"{name}.diagonal().zero_()"]
        return rng.choice(ways)

    def foreach(self):
        # One dtype, no leaf that needs a gradient, no expanded tensor: what is written before an error is not promised.
        first = self.pick(lambda t: t.is_floating_point() and t.numel())
        dtype = first and self.get(first).dtype
        names = self.names(
            "t", lambda t: t.dtype is dtype and t.numel() and not t.requires_grad and 0 not in t.stride()
        )
        if len(names) < 2:
            return None
        chosen = ", ".join(self.rng.sample(names, min(len(names), 3)))
        op = self.rng.choice(("add_", "mul_", "sin_", "lerp_", "addcmul_", "zero_", "clamp_max_", "sub", "norm"))
        if op == "lerp_":
            return f"torch._foreach_lerp_([{chosen}], [{chosen}], 0.5)"
        if op == "addcmul_":
            return f"torch._foreach_addcmul_([{chosen}], [{chosen}], [{chosen}], 0.5)"
        if op in ("sin_", "zero_"):
            return f"torch._foreach_{op}([{chosen}])"
        if op in ("sub", "norm"):
            return f"{self.new()} = torch._foreach_{op}([{chosen}]{', 0.5' if op == 'sub' else ''})[0]"
        return f"torch._foreach_{op}([{chosen}], 0.5)"

    def out(self):
        a, b = self._two()
        if a is None:
            return None
        rng = self.rng
        used = [self.get(n).untyped_storage().data_ptr() for n in (a, b)]
        into = self.pick(lambda t: t.untyped_storage().data_ptr() not in used and not shares_elements(t))
        if into is None:
            return f"torch.{rng.choice(('add', 'mul', 'maximum'))}({a}, {b}, out={a})"
        into = f"apart({rng.choice((into, f'{into}[:0]' if self.get(into).dim() else into, into))}, {a}, {b})"
        return rng.choice(
            (
                f"torch.add({a}, {b}, out={into})",
                f"torch.mul({a}, {b}, out={into})",
                f"torch.sub({a}, 1, out={into})",
                f"torch.abs({a}, out={into})",
                f"torch.cat([{a}, {a}], out={into})",
                f"torch.eq({a}, {b}, out={into})",
                f"torch.where({a} > 0, {a}, {b}, out={into})",
                f"torch.sum({a}, 0, out={into})",
                f"torch.cumsum({a}, 0, out={into})",
                f"torch.index_select({a}, 0, order({self.seed()}, len({a})), out={into}.to({a}.dtype))",
                f"torch.arange(0, 6, out={into})",
                f"torch.clamp({a}, 0, 1, out={into})",
                f"torch.stack([{a}, {a}], out={into})",
                f"torch.nonzero({a}, out={into})",
                f"torch.sin({a}, out={into})",
            )
        )

    def read(self):
        name, rng = self.pick(), self.rng
        if name is None:
            return None
        t = self.get(name)
        ways = [f"see({name}.tolist())", f"see({name})", f"see(text({name}))", f"see({name}.sum().item())"]
        ways += [
            f"see(torch.equal({name}, {self.pick()}))",
            f"see(len({name}.nonzero()))",
            f"see(bool(({name} != 0).any()))",
        ]
        if t.numel():
            ways += [f"see({name}.reshape(-1)[{rng.randrange(t.numel())}].item())"] * 3
            ways += [f"see({name}.flatten()[-1:].tolist())"]
            if not t.is_complex():
                ways += [f"see(float({name}.max()) + 0)", f"see(bool({name}.min() > 0))", f"see(int({name}.argmax()))"]
                ways += [f"if bool({name}.flatten()[0] > 0): {name}.mul_(2)"]
        if t.numel() == 1:
            ways += [f"see({name}.item())"] * 4
        return rng.choice(ways)

    def element(self):
        """A write of one element, or a part of a row, by its number, which changes in loops."""
        name, rng = self.pick(lambda t: t.dim() > 0 and t.numel() > 0 and not shares_elements(t)), self.rng
        if name is None:
            return None
        t = self.get(name)
        n = t.shape[0]
        at = f"k % {n}" if self._depth else str(rng.randrange(n))
        one = f"{name}[{at}]"
        value = rng.choice(("k" if self._depth else "3", self.number(), f"{name}[{rng.randrange(n)}].clone()"))
        ways = [f"{one} = {value}", f"{one} = {value}", f"{name}[{at}:] = {value if 'clone' not in value else 2}"]
        if t.dtype is not torch.bool:
            ways += [f"{one} += 1", f"{one} *= -1", f"{name}[-1] -= {name}[0].clone()"]
        if t.dim() == 1 and not t.is_complex():
            ways += [
                f"see({one}.item())",
                f"if {one} > 0: {name}[-1] = 0",
                f"see(int({one}) + 1)",
                f"{one} = float({name}[0])",
            ]
            ways += [
                f"see(({name} == {value}).nonzero().tolist())" if "clone" not in value else f"see({name}.tolist())"
            ]
            if t.dtype is torch.int64:
                ways += [f"{self.new()} = {name}[{name} % {n}]"]
        return rng.choice(ways)

    def decisions(self):
        """A small tensor whose values the client knows."""
        values = [self.rng.randrange(-3, 9) for _ in range(self.rng.randrange(1, 7))]
        kind = self.rng.choice(("int64", "int32", "float32", "float64", "bool"))
        return f"{self.new()} = torch.tensor({values}, dtype=torch.{kind}, device=D)"

    def large(self):
        n = self.rng.choice((5000, 20001, 300000, 300001))
        return f"{self.new()} = through_host({self.seed()}, {n}, {[self.rng.randrange(5) for _ in range(3)]})"

    def to_host(self):
        name, rng = self.pick(), self.rng
        if name is None:
            return None
        h = self.new("h") if len(self.names("h")) < 4 or not self.names("h") else rng.choice(self.names("h"))
        return rng.choice(
            (
                f"{h} = host({name})",
                f"{h} = {name}.to('cpu', copy=True, non_blocking=True); sync()",
                f"{h} = pinned(torch.zeros({name}.shape, dtype={name}.dtype)); {h}.copy_({name}, non_blocking=True); sync()",
                f"{h} = torch.zeros({name}.shape); {h}.copy_({name})",
                f"{h} = {name}.to('cpu', torch.float64, copy=True)",
            )
        )

    def from_host(self):
        hosts = self.names("h")
        if not hosts:
            return None
        h, rng, name = self.rng.choice(hosts), self.rng, self.pick()
        return rng.choice(
            (
                f"{self.new()} = {h}.to(D, copy=True)",
                f"{self.new()} = {h}.to(D, torch.float32, copy=True)",
                f"{self.new()} = pinned({h}).to(D, copy=True, non_blocking=True); sync()",
                f"{name}.copy_({h})",
                f"{name}.copy_({h}, non_blocking=True); sync()",
                f"{name}[...] = {h}",
                f"{h}.add_(1)",
                f"{self.new()} = {h}.to(D, copy=True); {h}.zero_()",
                f"{name}.copy_({h}); {h}.fill_(1)",
                f"see({h})",
                f"{self.new()} = torch.as_tensor({h}.tolist(), device=D)",
            )
        )

    def delete(self):
        name = self.pick()
        return name and f"del {name}"

    def storage(self):
        name, rng = self.pick(), self.rng
        if name is None:
            return None
        other, t = self.pick(), self.get(name)
        n = t.numel()
        held = (
            f"{name}.untyped_storage().nbytes() // {name}.itemsize"  # elements beyond a storage have no defined values
        )
        return rng.choice(
            (
                f"{name}.data = {other}.clone()"
                if self.get(other).dtype is t.dtype
                else f"{name}.data = {name}.clone()",
                f"{name}.set_({other})",
                f"{name}.set_({name}.untyped_storage(), 0, (min(2, {held}),), (1,))",
                f"{name}.detach_()",
                f"larger({name})",
                f"larger({name})",
                f"{name}.resize_(max({name}.numel() - 1, 0))"
                if t.untyped_storage().nbytes() >= (t.storage_offset() + n) * t.element_size()  # else: a larger storage
                else f"{name}.resize_({name}.shape)",
                f"{name}.data.mul_(2)",
                f"{name}.data.fill_(1)",
                f"{name}.detach().add_(1)",
                # What a storage has after it was emptied, or behind its old end, is not defined until it is written.
                f"s = {name}.untyped_storage(); n = s.nbytes(); s.resize_(0); s.resize_(n); s.fill_(0); del s",
                f"s = {name}.untyped_storage(); n = s.nbytes(); s.resize_(n + 8); "
                "torch.empty(0, dtype=torch.uint8, device=D).set_(s)[n:] = 0; del s",
                f"{self.new()} = torch.empty(0, dtype={name}.dtype, device=D).set_({name}.untyped_storage())",
                f"{name}.untyped_storage().copy_({name}.clone().untyped_storage())"
                if t.is_contiguous() and t.untyped_storage().nbytes() == n * t.element_size()
                else f"{name}.untyped_storage().fill_(1)",
                f"see(sum({name}.untyped_storage().tolist()))"
                if t.untyped_storage().nbytes() == n * t.element_size()
                else f"see({name})",
                f"w = alive({name}); {name} = None; del {name}; see(w() is None); del w",
                "collect()",
            )
        )

    def error(self):
        name, rng = self.pick(lambda t: t.dim() > 0), self.rng
        if name is None:
            return None
        n = len(self.get(name))
        return rng.choice(
            (
                f"{name} + torch.ones(7, 19, device=D)",
                f"{name}.view(7, 11, 13)",
                f"{name}[{n + 3}]",
                f"{name}.transpose(0, 9)",
                f"torch.cat([{name}, torch.ones(2, 2, 2, 2, 2, device=D)])",
                f"{name} @ torch.ones(77, 3, device=D)",
                f"{name}.add_(torch.ones(9, 9, 9, device=D))",
                f"{name}.to(torch.int64).bitwise_and_(0.5)",
                f"see(late(lambda: {name}.index_select(0, torch.tensor([{n + 2}], device=D))))",
                f"see(late(lambda: {name}[torch.tensor([{n + 2}], device=D)]))",
                f"see(late(lambda: {name}.gather(0, torch.full_like({name}, {n}, dtype=torch.int64))))",
                f"{name}.item()",
                f"bool({name})",
                f"{name}.no_such_name",
                f"{name}.narrow(0, 0, {n + 4})",
                "torch.zeros(3, device=D).expand(2, 2)",
                f"{name}.half().unfold(0, {n + 1}, 1)",
                f"torch.linalg.inv({name})",
            )
        )

    # -- differentiation ----------------------------------------------------------------------------------------------

    def function(self, x="x", depth=2):
        """An expression that is differentiable in x and has x's shape."""
        rng = self.rng
        if depth == 0:
            return x
        a = self.function(x, depth - 1)
        return rng.choice(
            (
                f"({a}).sin()",
                f"({a}).tanh() * 1.5",
                f"({a} + {x} * 0.5)",
                f"({a}) * {self.function(x, depth - 1)}",
                f"torch.where({x} > 0, {a}, {x} * 0.25)",
                f"F.softplus({a})",
                f"F.gelu({a})",
                f"F.silu({a})",
                f"({a}).clamp(-2, 2)",
                f"({a}) - ({a}).mean()",
                f"({a}) / (1 + ({a}).square().sum())",
                f"({a}).clone().mul_(0.5)",
                f"({a}).clone().clamp_(-1, 1)",
                f"F.softmax({a}, -1)" if self._dim else f"({a}).exp()",
                f"written({a})" if self._dim else f"({a}).expm1()",
                f"Scaled.apply({a}, 0.5)",
                f"Doubled.apply(({a}).clone())",
                f"({a}).flip(0)" if self._dim else f"({a}).cos()",
                f"({a}).cumsum(-1)" if self._dim else f"({a}).neg()",
                f"torch.cat([({a})[:1], ({a})[1:] * 2])" if self._dim else f"({a}).sigmoid()",
                f"({a}).sort(-1, stable=True).values" if self._dim else f"({a}).atan()",
                f"F.layer_norm({a}, ({a}).shape[-1:])" if self._dim else f"({a}).abs()",
                f"F.linear({a}, torch.ones(({a}).shape[-1], ({a}).shape[-1], dtype=({a}).dtype, device=D))"
                if self._dim > 1  # the CPU's product of a matrix and a vector changes its result in place
                else f"({a}).square()",
            )
        )

    def _real(self):
        name = self.pick(lambda t: t.dtype in (torch.float32, torch.float64) and 0 < t.numel() < 100)
        if name is not None:
            self._dim = self.get(name).dim()
        return name

    def require(self):
        name = self.pick(lambda t: t.is_floating_point() and not t.requires_grad)
        if name is None:
            return None
        return self.rng.choice(
            (
                f"{name}.requires_grad_()",
                f"{self.new()} = {name}.detach().clone().requires_grad_()",
                f"{name}.requires_grad_()",
            )
        )

    def forward(self):
        name = self._real()
        if name is None:
            return None
        if not self.get(name).requires_grad and self.rng.random() < 0.5:
            return f"{name} = {name}.detach().clone().requires_grad_(); {self.new()} = (lambda x: {self.function()})({name})"
        return f"{self.new()} = (lambda x: {self.function()})({name})"

    def backward(self):
        name = self.pick(is_result)
        rng = self.rng
        if name is None:
            return self.forward()
        leaves = self.names("t", lambda t: t.requires_grad and not is_result(t, True))
        leaf = rng.choice(leaves) if leaves else name
        retain = rng.choice(("", "retain_graph=True", "retain_graph=True"))
        return rng.choice(
            (
                f"{name}.sum().backward({retain})",
                f"{name}.backward(R({self.seed()}, *{name}.shape, dtype={name}.dtype){', ' + retain if retain else ''})",
                f"{self.new()} = torch.autograd.grad({name}.sum(), {leaf}, allow_unused=True, create_graph=True)[0]",
                f"{self.new()} = torch.autograd.grad({name}.square().sum(), {leaf}, retain_graph=True)[0]",
                # With PyTorch 2.13, a hook on a view whose base was written since ends the process if grad_fn was not read.
                f"{leaf}.grad_fn; {leaf}.register_hook(lambda g: g * 2)",
                f"{name}.grad_fn; {name}.register_hook(lambda g: see(g))",
                f"{name}.retain_grad()",
                f"{leaf}.grad = None",
                f"see({leaf}.grad)",
                f"{leaf}.grad.zero_()",
                f"{self.new()} = {leaf}.grad",
                f"{self.new()} = {leaf}.grad.clone()",
                f"with torch.no_grad(): {leaf}.sub_({leaf}.grad, alpha=0.1)",
                f"torch.nn.utils.clip_grad_norm_([{leaf}], 1.0, foreach=True)",
            )
        )

    def transforms(self):
        name = self._real()
        if name is None:
            return None
        rng, f = self.rng, f"lambda x: {self.function()}"
        # The zeros of forward-mode differentiation are ordinary zeros on the device: times an infinity, they are not-a-number,
        # and a sum with one of them has no negative zero.
        x = f"{name}.detach().nan_to_num(0, 4, -4)"
        one = f"(lambda x: ({self.function()}).sum())"
        return f"{self.new()} = " + rng.choice(
            (
                f"torch.func.grad({one})({x})",
                f"torch.func.grad_and_value({one})({x})[0]",
                f"alone(lambda: torch.func.jvp({f}, ({x},), (torch.ones_like({name}),))[1]) + 0",
                f"torch.func.vjp({f}, {x})[1](torch.ones_like({name}))[0]",
                f"torch.func.jacrev({f})({x}).sum()",
                f"alone(lambda: torch.func.jacfwd({f})({x}).sum())",
                f"alone(lambda: torch.func.hessian({one})({x}).sum())",
                f"torch.func.vmap(lambda x: x * 2 + x.sum())({x})" if self._dim else f"{x}.sin()",
                f"torch.func.vmap(torch.func.grad(lambda x: x.sin().sum()))({x})" if self._dim else f"{x}.cos()",
                f"dual({f}, {x}, torch.ones_like({name})).tangent + 0",
                f"dual({f}, {x}, torch.ones_like({name})).primal",
                f"dual({f}, {x}, R({self.seed()}, *{name}.shape, dtype={name}.dtype)).tangent + 0",
                f"again({f}, {name})",
                f"saved_on_host({f}, {name})",
                f"torch.autograd.functional.hvp({one}, {x}, torch.ones_like({name}))[1]",
                f"alone(lambda: torch.func.linearize({f}, {x})[1](torch.ones_like({name}))) + 0",
            )
        )

    # -- modules ------------------------------------------------------------------------------------------------------

    def module(self):
        rng = self.rng
        if len(self.names("m")) < 2:
            make, shape = rng.choice(
                (
                    ("nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))", (5, 4)),
                    ("nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU())", (3, 4)),
                    ("nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.SiLU(), nn.Flatten())", (2, 2, 5, 5)),
                    ("nn.Sequential(nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.MaxPool1d(2))", (2, 2, 7)),
                    ("nn.GRU(4, 3)", (3, 2, 4)),
                    ("nn.LSTM(4, 3, batch_first=True)", (2, 3, 4)),
                    ("nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0)", (3, 2, 4)),
                    ("nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False), nn.Softmax(-1))", (6, 4)),
                    ("nn.Bilinear(4, 4, 2)", None),
                )
            )
            if shape is None:
                return None
            number = self.new("m")[1:]
            way = rng.choice(("foreach=True", "foreach=False", "fused=True"))
            optimizer = rng.choice(
                (
                    f"torch.optim.SGD(parameters(m{number}), lr=0.1, momentum=0.9, {way})",
                    f"torch.optim.Adam(parameters(m{number}), lr=0.02, {way})",
                    f"torch.optim.AdamW(parameters(m{number}), lr=0.02, amsgrad=True, {way})",
                    f"torch.optim.RMSprop(parameters(m{number}), lr=0.02, foreach=True)",
                    f"torch.optim.Adam(parameters(m{number}), lr=torch.tensor(0.02), foreach=False)",
                )
            )
            self._shapes[f"m{number}"], self._made[f"m{number}"] = shape, optimizer
            return f"m{number} = module({self._seed}, lambda: {make}); o{number} = {optimizer}"
        m = rng.choice(self.names("m"))
        o, x = f"o{m[1:]}", self.values(self._shapes[m], "float32")
        scaler = ", torch.amp.GradScaler(D, init_scale=64.0)" if rng.random() < 0.3 else ""
        # Both lists of casts have products of matrices; the CPU has no list for recurrent layers, norms and losses.
        mixed = (
            ", dtype=torch.bfloat16"
            if "Linear" in str(self.space[m]) and "Norm" not in str(self.space[m]) and rng.random() < 0.3
            else ""
        )
        return rng.choice(
            (
                f"see(train({m}, {o}, {x}{scaler}{mixed}).item())",
                f"{self.new()} = train({m}, {o}, {x}{scaler}{mixed})",
                f"{self.new()} = train({m}, {o}, {x})",
                f"with torch.no_grad(): see({m}({x}))",
                f"{m}.eval()",
                f"{o}.param_groups[0]['lr'] *= 0.5" if "lr=torch" not in str(self._made[m]) else f"{m}.train()",
                f"{o}.zero_grad(set_to_none={rng.random() < 0.5})",
                f"see(torch.nn.utils.clip_grad_norm_(parameters({m}), 0.5, foreach=True))",
                f"see(train({m}, {o}, {x}).item())",
                f"{self.new()} = torch.nn.utils.parameters_to_vector(parameters({m})).detach()",
                f"{m}.train()",
                f"{o}.load_state_dict(passed({o}.state_dict(), {rng.choice(('deepcopy', 'save', 'map'))!r}))",
                f"{m}.load_state_dict(passed({m}.state_dict(), {rng.choice(('deepcopy', 'save', 'map'))!r}))",
                f"{m}.to(torch.float64).to(torch.float32)",
                f"{m}.cpu().to(D)",
                f"with torch.no_grad(): [p.mul_(0.9) for p in {m}.parameters()]",
                f"{self.new()} = next({m}.parameters())",
                f"{self.new()} = torch.func.functional_call({m}, halves({m}), ({x},))",
            )
        )

    def compile(self):
        name = self._real()
        if name is None or self._depth or self.rng.random() < 0.6:
            return None
        f = self.function()
        return f"c = compiled(lambda x: {f}); {self.new()} = c({name}.detach()); {self.new()} = c({name}.detach() * 0.5); del c"

    def fused(self):
        """Calls of larger functions, each of which is one instruction or a decomposition."""
        name = self.pick(lambda t: t.is_floating_point() and t.dim() >= 2 and t.numel())
        if name is None:
            return None
        rng = self.rng
        t = self.get(name)
        last = t.shape[-1]
        return f"{self.new()} = " + rng.choice(
            (
                f"attend({name}.float()[None])"
                if t.dim() == 2 and t.dtype is torch.float32
                else f"F.normalize({name})",
                f"F.layer_norm({name}, {name}.shape[-1:])",
                f"F.rms_norm({name}, {name}.shape[-1:])",
                f"F.cross_entropy({name}.reshape(-1, {last}), order({self.seed()}, 99)[: {t.numel() // last}] % {last})",
                f"F.mse_loss({name}, {name}.roll(1)) * 1",
                f"F.pad({name}, (1, 0))",
                f"F.embedding(order({self.seed()}, {t.shape[0]}), {name})" if t.dim() == 2 else f"F.silu({name})",
                f"F.one_hot({name}.argmax(-1), {t.shape[-1]})",
                f"torch.einsum('...i,...i->...', {name}, {name}.cos())",
                f"F.glu(torch.cat([{name}, {name}], -1))",
                f"torch.cdist({name}, {name})" if t.dtype is torch.float32 else f"F.elu({name})",
                f"torch.linalg.vector_norm({name}, dim=-1)",
                f"torch.bincount({name}.argmax(-1).flatten())",
                f"torch.searchsorted({name}.sort(-1).values, {name})",
                f"F.huber_loss({name}, {name} * 2)",
                f"{name}.softmax(-1).log()",
                f"torch.fft.rfft({name}).abs()" if t.dtype is torch.float32 else f"F.relu6({name})",
                f"torch.histc({name}, 4, -2, 2)" if t.dtype is torch.float32 else f"F.mish({name})",
            )
        )

    # -- blocks -------------------------------------------------------------------------------------------------------

    def loop(self):
        if self._depth:
            return None
        times = self.rng.choice((3, 5, 5, 40, 40))
        return [f"for k in range({times}):\n    BODY", self.rng.randrange(2, 7), times]

    def sized(self):
        """In a loop: a tensor whose size changes with each iteration, as a cache, a prefix, a batch with other rows."""
        name = self.pick(lambda t: t.dim() > 0 and t.shape[0] > 0)
        if name is None or not self._depth or self._capturing:
            return None
        t, rng = self.get(name), self.rng
        n, last = t.shape[0], t.shape[-1]
        new, most = self.new(), rng.choice((3, 9, 40))
        ones, same = ", 1" * (t.dim() - 1), ", -1" * (t.dim() - 1)
        part = rng.choice(
            (
                f"{name}[: k % {n} + 1]",
                f"{name}[k % {n} :]",
                f"{name}.narrow(0, k % {n}, {n} - k % {n})",
                f"{name}.repeat(k % {most} + 1{ones})",
                f"{name}[:1].expand(k % {most} + 1{same})",
            )
        )
        rows = f"R({self._seed} + k, k % {most} + 1, {last})"
        ways = [
            f"{new} = {part}",
            f"{new} = {part}.clone()",
            f"{new} = {rows}",
            f"{new} = torch.arange(k % {most} + 1, device=D)",
            f"{new} = torch.zeros(k % {most} + 1, 3, device=D)",
            f"{new} = torch.cat([{name}, {part}])[:60]",
            f"{name} = torch.cat([{name}, {name}[-1:]])[-{most}:]",
            f"see({part}.sum().item())",
            f"see({part})",
            f"{new} = {part}.flip(0).sum(0)",
            f"{part}.fill_({self.number()})" if "re" not in part and "ex" not in part else f"{new} = {part}",
            f"{new} = {part}.{rng.choice(('sum', 'any', 'prod'))}()",
            f"{new} = {part}.reshape(-1)[k % 3 :]",
        ]
        if t.dtype in (torch.float32, torch.float64):
            self._dim = t.dim()
            function = f"(lambda x: {self.function()})({part})"
            leaf = rng.choice(self.names("t", lambda u: u.requires_grad and not is_result(u, True)) or [name])
            ways += [f"{new} = {function}"] * 4
            ways += [
                f"see({function}.sum().item())",
                f"{function}.sum().backward()",
                f"{new} = torch.autograd.grad({function}.sum(), {leaf}, allow_unused=True)[0]",
                f"{name} = torch.cat([{name}, {function}.reshape(-1, *{tuple(t.shape[1:])})[:1]])[-{most}:]",
                f"{new} = F.pad({part}, (k % 3, 0))",
                f"{new} = torch.softmax({part}, 0)",
            ]
            if t.dim() == 2 and t.dtype is torch.float32:
                ways += [
                    f"{new} = {part} @ {part}.mT",
                    f"{new} = {rows} @ {name}.mT",
                    f"{new} = attend({part}[None])",
                ] * 2
                cached = ", ".join([f"{part}[None, None]"] * 2)
                ways += [f"{new} = F.scaled_dot_product_attention({name}[None, None, -1:], {cached})[0, 0]"]
        modules = self.names("m")
        if modules and rng.random() < 0.4:
            m = rng.choice(modules)
            batch = f"R({self._seed} + k, {self._shapes[m][0]} + k % {most}{''.join([f', {d}' for d in self._shapes[m][1:]])})"
            ways = [f"see(train({m}, o{m[1:]}, {batch}).item())", f"with torch.no_grad(): {new} = {m}({batch})"]
        return rng.choice(ways)

    def branch(self):
        """Steps that run if a value says so."""
        name = self.pick(lambda t: t.numel() > 0 and not t.is_complex())
        if name is None:
            return None
        ways = [f"bool(({name} > 0).any())", f"{name}.flatten()[0] > 0", f"{name}.sum().item() > 0"]
        if self._depth:
            ways += ["k % 3 == 1", "k > 20", f"bool({name}.flatten()[k % {self.get(name).numel()}] > 0)"]
        return [f"if {self.rng.choice(ways)}:\n    BODY", self.rng.randrange(1, 4), 1]

    def region(self):
        head = self.rng.choice(
            ("torch.no_grad()", "torch.no_grad()", "torch.enable_grad()", "side_stream()", "side_stream()")
        )
        return [f"with {head}:\n    BODY", self.rng.randrange(1, 4), 1]

    def graph(self):
        """A captured graph and its replays. Its body makes names of its own, so that the CPU can run it again."""
        if self._depth:
            return None
        between = self.rng.choice(("pass", "pass", "{0}.copy_(R({1} + k, *{0}.shape))", "{0}.add_(1)", "{0}[:1] = k"))
        # What needs a gradient does not change, nor does its detached alias: the graph's views of it would be older than the
        # change, and the CPU's newer.
        needed = self.names("t", lambda t: t.requires_grad)
        places = {self.get(n).untyped_storage().data_ptr() for n in needed if self.get(n).layout is torch.strided}
        name = self.pick(
            lambda t: (
                t.dtype is torch.float32
                and t.dim() > 0
                and not t.requires_grad
                and t.untyped_storage().data_ptr() not in places
                and not shares_elements(t)
                and 0 not in t.stride()
            )
        )
        between = between.format(name, self._seed) if name else "pass"
        shown = f"see({self.pick()})" if self.rng.random() < 0.5 else "pass"
        head = f"g = graph(lambda: BODY)\nwith torch.no_grad():\n    for k in range(3): {between}; g(); {shown}\ndel g"
        return [head, self.rng.randrange(2, 7), 1]

    def captured(self):
        """A step of a graph: it reads nothing, copies nothing from the host and changes no tensor's sizes."""
        for _ in range(20):
            made = self.rng.choice(CAPTURED)(self)
            if made and not any(word in made for word in NOT_CAPTURED):
                return made
        return None

    def thread(self):
        if self._depth:
            return None
        return ["in_thread(lambda: BODY)", self.rng.randrange(1, 4), 1]


STEPS = [
    (Maker.factory, 5),
    (Maker.unary, 8),
    (Maker.binary, 12),
    (Maker.clamp, 2),
    (Maker.matmul, 3),
    (Maker.reduction, 7),
    (Maker.view, 12),
    (Maker.copy, 6),
    (Maker.join, 3),
    (Maker.index, 5),
    (Maker.write, 18),
    (Maker.foreach, 2),
    (Maker.out, 4),
    (Maker.read, 8),
    (Maker.to_host, 3),
    (Maker.from_host, 4),
    (Maker.delete, 5),
    (Maker.storage, 4),
    (Maker.error, 2),
    (Maker.require, 2),
    (Maker.forward, 3),
    (Maker.backward, 6),
    (Maker.transforms, 2),
    (Maker.module, 4),
    (Maker.compile, 0.15),
    (Maker.fused, 3),
    (Maker.element, 8),
    (Maker.sized, 8),
    (Maker.decisions, 2),
    (Maker.large, 0.3),
]
BLOCKS = [(Maker.loop, 5), (Maker.region, 3), (Maker.branch, 2), (Maker.thread, 0.5), (Maker.graph, 1)]
CAPTURED = (
    *(Maker.unary, Maker.binary, Maker.write, Maker.write, Maker.view, Maker.reduction, Maker.matmul, Maker.clamp),
    *(Maker.join, Maker.foreach, Maker.fused),
)
NOT_CAPTURED = (
    *(
        "R(",
        "order(",
        "tensor(",
        " != 1]",
        "t_()",
        "transpose_",
        "squeeze_",
        "one_hot",
        "bincount",
        "histc",
        " h",
        "resize",
    ),
    *("repeat_interleave", "copy_("),
    "alpha=t",  # a number that PyTorch reads from the device
)
