"""Makes unlawful calls from lawful ones by changing a few arguments. The same seed gives the same calls."""

import random
from dataclasses import replace

import torch
from call import Memory, Window, is_written, windows_of
from wooly_executor.runtime.buffers import WIS_DTYPE

INTS = (0, 1, -1, 2, -2, 3, 7, 63, 64, 65, 127, 255, 1 << 15, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 40, -(1 << 40), 1 << 62,
        (1 << 63) - 1, -(1 << 63))  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), -float("inf"), 1e300, -1e300, 1e-300, 2.0**31, 2.0**63)
SIZES = (0, 1, 2, 3, 5, 7, 16, 17, 64, 257)
DTYPES = tuple(WIS_DTYPE)
LIKELY = (
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
    torch.complex64,
    torch.bfloat16,
)
LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch._mkldnn)
FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
STRINGS = (
    "",
    "sum",
    "mean",
    "prod",
    "max",
    "min",
    "none",
    "floor",
    "trunc",
    "tanh",
    "replace",
    "L",
    "N",
    "A",
    "amax",
    "reduced",
)
#: Maximum size of a mutated tensor, in bytes.
LARGEST = 1 << 18
#: Numbers of changes to a call, and their probabilities.
CHANGES = (1, 1, 1, 1, 2, 2, 3, 4)


class Corpus:
    """Lawful calls by operator, and the values of arguments that occur in them."""

    def __init__(self, lawful):
        self.lawful = lawful
        strings = {v for calls in lawful.values() for c in calls for _, v in c.named() if isinstance(v, str)}
        self.strings = tuple(sorted(strings | set(STRINGS)))


def mutant(corpus, name, seed, k):
    """Return the `k`th mutant of an operator's lawful calls."""
    rng = random.Random(f"{seed} {name} {k}")
    calls = corpus.lawful[name]
    mutation = _Mutation(rng, corpus, calls[k % len(calls)] if k < len(calls) else rng.choice(calls))
    for _ in range(rng.choice(CHANGES)):
        mutation.change()
    return mutation.finished()


class _Mutation:
    def __init__(self, rng, corpus, call):
        self._rng, self._corpus, self._call = rng, corpus, call
        self._memories = list(call.memories)
        declared = call.schema.arguments
        self._values = {a.name: v for a, v in call.named()}
        self._declared = {a.name: a for a in declared}
        self._order = [a.name for a in declared]
        self._unsaid, self._read = set(), {}

    def finished(self):
        """Return the call in its current state. All arguments before the last positional one are passed, too."""
        call, given = self._call, self._values
        positional = [n for n in self._order if not self._declared[n].kwarg_only]
        last = max([i for i, n in enumerate(positional) if n in given], default=-1)
        args = []
        for n in positional[: last + 1]:
            a = self._declared[n]
            args.append(given[n] if n in given else a.default_value if a.has_default_value() else None)
        args = [tuple(v) if isinstance(v, list) else v for v in args]
        kwargs = tuple([(n, given[n]) for n in self._order if n in given and self._declared[n].kwarg_only])
        late = self._rng.random() < 0.25
        unsaid = tuple(sorted(self._unsaid))
        read = tuple(sorted(self._read.items()))
        made = replace(
            call, args=tuple(args), kwargs=kwargs, memories=tuple(self._memories), late=late, unsaid=unsaid, read=read
        )
        return made.tidy()

    # -- one change --------------------------------------------------------------------------------------------------

    def change(self):
        rng = self._rng
        names = [n for n in self._order if n in self._values]
        absent = [n for n in self._order if n not in self._values]
        if absent and (not names or rng.random() < 0.1):
            name = rng.choice(absent)
            a = self._declared[name]
            self._values[name] = self._other(a, a.default_value if a.has_default_value() else None)
            return
        if not names:
            return
        name = rng.choice(names)
        a, value = self._declared[name], self._values[name]
        if is_written(a) and rng.random() < 0.04:
            self._unsaid.add(name)
            return
        if rng.random() < 0.03:
            self._read[name] = rng.choice(("conj", "neg"))
            return
        if rng.random() < 0.04:
            other = rng.choice(names)  # swap two arguments
            self._values[name], self._values[other] = self._values[other], value
            return
        self._values[name] = self._other(a, value)

    def _other(self, a, value):
        """Return another value for an argument."""
        rng, kind = self._rng, str(a.type)
        if kind.startswith("Optional") and value is not None and rng.random() < 0.2:
            return None
        if value is None:
            return self._random_value(kind)
        if isinstance(value, Window):
            return self._tensor(value)
        if isinstance(value, tuple):
            return self._list(value, kind)
        if isinstance(value, bool):
            return not value if rng.random() < 0.8 else rng.choice(INTS)
        if isinstance(value, int):
            return self._int(value)
        if isinstance(value, (float, complex)):
            return rng.choice(FLOATS) if rng.random() < 0.8 else rng.choice(INTS)
        if isinstance(value, str):
            return rng.choice(self._corpus.strings)
        if isinstance(value, torch.dtype):
            return rng.choice(DTYPES)
        if isinstance(value, torch.layout):
            return rng.choice(LAYOUTS)
        if isinstance(value, torch.memory_format):
            return rng.choice(FORMATS)
        return None

    def _random_value(self, kind):
        rng = self._rng
        if "Generator" in kind or "Device" in kind:
            return None
        if "List[" in kind and "Tensor" in kind:
            return tuple([self._any_tensor() for _ in range(rng.randrange(4))])
        if "Tensor" in kind:
            return self._any_tensor()
        if "List[" in kind:
            pick = FLOATS if "float" in kind else INTS
            return tuple([rng.choice(pick) if rng.random() < 0.5 else 1 for _ in range(rng.randrange(5))])
        if "bool" in kind:
            return rng.random() < 0.5
        if "float" in kind or "number" in kind or "Scalar" in kind:
            return rng.choice(FLOATS)
        if "str" in kind:
            return rng.choice(self._corpus.strings)
        return self._int(1)

    def _int(self, value):
        rng = self._rng
        near = (value + 1, value - 1, -value, 2 * value, value // 2)
        return rng.choice(near) if rng.random() < 0.5 else rng.choice(INTS)

    def _list(self, value, kind):
        rng, items = self._rng, list(value)
        how = rng.randrange(6)
        if how == 0 and items:
            del items[rng.randrange(len(items))]
        elif how == 1:
            more = rng.choice(items) if items else self._any_tensor() if "Tensor" in kind else rng.choice(INTS)
            items.insert(rng.randrange(len(items) + 1), more)
        elif how == 2 and len(items) > 1:
            rng.shuffle(items)
        elif how == 3 and rng.random() < 0.3:
            items = []
        elif items:
            k = rng.randrange(len(items))
            item = items[k]
            if isinstance(item, Window):
                items[k] = self._tensor(item)
            elif isinstance(item, bool):
                items[k] = not item
            elif isinstance(item, int):
                items[k] = self._int(item)
            elif isinstance(item, float):
                items[k] = rng.choice(FLOATS)
            elif item is None:
                items[k] = self._any_tensor()
        return tuple(items)

    # -- tensors -----------------------------------------------------------------------------------------------------

    def _windows(self):
        return windows_of(tuple(self._values.values()))

    def _any_tensor(self):
        known = self._windows()
        if known and self._rng.random() < 0.6:
            return self._tensor(self._rng.choice(known)) if self._rng.random() < 0.5 else self._rng.choice(known)
        sizes = [self._rng.choice(SIZES) for _ in range(self._rng.randrange(4))]
        return self._dense_tensor(self._rng.choice(LIKELY), sizes)

    def _tensor(self, w):
        rng = self._rng
        how = rng.randrange(100)
        if how < 25:
            return self._dense_tensor(w.dtype, self._sizes(w.sizes), like=w)
        if how < 45:
            return self._dense_tensor(w.dtype, w.sizes)
        if how < 55:
            return self._rank(w)
        if how < 63:
            return self._dense_tensor(rng.choice(LIKELY if rng.random() < 0.7 else DTYPES), w.sizes, like=w)
        if how < 75:
            return self._strided(w)
        if how < 85:
            return self._alias(w)
        if how < 92:
            return self._few_changes(w)
        return self._dense_tensor(w.dtype, [0] if rng.random() < 0.5 else [])

    def _sizes(self, sizes):
        rng, sizes = self._rng, list(sizes)
        if not sizes:
            return [rng.choice(SIZES)]
        for _ in range(1 if rng.random() < 0.7 else 2):
            k = rng.randrange(len(sizes))
            sizes[k] = rng.choice((0, 1, max(sizes[k] - 1, 0), sizes[k] + 1, 2 * sizes[k], rng.choice(SIZES)))
        if rng.random() < 0.1:
            rng.shuffle(sizes)
        return sizes

    def _rank(self, w):
        rng, sizes = self._rng, list(w.sizes)
        how = rng.randrange(5)
        if how == 0:
            sizes.insert(rng.randrange(len(sizes) + 1), rng.choice((1, 1, 2)))
        elif how == 1 and sizes:
            del sizes[rng.randrange(len(sizes))]
        elif how == 2:
            sizes = [torch.Size(sizes).numel()]
        elif how == 3 and rng.random() < 0.2:
            sizes = [1] * rng.choice((16, 26, 64, 65, 130))
        else:
            sizes = []
        return self._dense_tensor(w.dtype, sizes, like=w)

    def _strided(self, w):
        """Return the tensor with other strides: transposed, overlapping, with gaps, zero, or with an offset."""
        rng, n = self._rng, len(w.sizes)
        how = rng.randrange(5)
        strides = list(w.strides)
        if how == 0:
            strides = list(torch.empty(tuple(reversed(w.sizes)), device="meta").stride())[::-1]
        elif how == 1:
            strides = [0] * n
        elif how == 2:
            strides = [1] * n
        elif how == 3:
            strides = [2 * s for s in strides]
        elif n:
            strides[rng.randrange(n)] = rng.choice((0, 1, 3))
        offset = rng.choice((0, 0, 1, 3, 16))
        return self._with_enough_memory(replace(w, strides=tuple(strides), offset=offset))

    def _alias(self, w):
        """Return a tensor on the memory of another tensor of the call, preferably of one that is written."""
        rng = self._rng
        written = [x for n, v in self._values.items() if is_written(self._declared[n]) for x in windows_of(v)]
        others = written if written and rng.random() < 0.6 else self._windows()
        if not others:
            return w
        other = rng.choice(others)
        if rng.random() < 0.3:
            return other
        itemsize, size = w.dtype.itemsize, len(self._memories[other.memory].raw)
        offset = rng.choice((0, 0, 1, 2, max(size // itemsize - 1, 0)))
        return self._with_enough_memory(replace(w, memory=other.memory, offset=offset))

    def _few_changes(self, w):
        """Return the same tensor with a few changed numbers."""
        rng, memory = self._rng, self._memories[w.memory]
        raw, item = bytearray(memory.raw), w.dtype.itemsize
        if len(raw) < item:
            return w
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(len(raw) // item) * item
            raw[at : at + item] = _numbers(rng, w.dtype, 1)
        self._memories.append(Memory(w.dtype, bytes(raw)))
        return replace(w, memory=len(self._memories) - 1)

    def _dense_tensor(self, dtype, sizes, like=None):
        """Return a dense tensor with its own numbers, or with numbers like those of another tensor."""
        sizes = tuple(sizes)
        n = torch.Size(sizes).numel()
        if n * dtype.itemsize > LARGEST:
            sizes, n = (), 1
        if like is not None and like.dtype is dtype and self._rng.random() < 0.7:
            raw = self._memories[like.memory].raw or bytes(dtype.itemsize)
            raw = (raw * (n * dtype.itemsize // len(raw) + 1))[: n * dtype.itemsize]
        else:
            raw = _numbers(self._rng, dtype, n)
        self._memories.append(Memory(dtype, raw))
        return Window(len(self._memories) - 1, dtype, sizes, _dense(sizes))

    def _with_enough_memory(self, w):
        """Return a tensor, and enlarge its memory if it is too small."""
        end, memory = w.view.end, self._memories[w.memory]
        if end > LARGEST:
            return replace(w, strides=(0,) * len(w.sizes), offset=0) if w.dtype.itemsize <= len(memory.raw) else w
        if end > len(memory.raw):
            raw = memory.raw or bytes(w.dtype.itemsize)
            unit = memory.dtype.itemsize
            n = -(-end // unit) * unit
            self._memories[w.memory] = Memory(memory.dtype, (raw * (n // len(raw) + 1))[:n])
        return w


def _dense(sizes):
    return tuple(torch.empty(sizes, device="meta").stride())


def _numbers(rng, dtype, n):
    """Return the bytes of `n` numbers: small ones, large ones, or random bits."""
    how, bits = rng.randrange(5), 8 * dtype.itemsize
    if how == 0:
        return rng.randbytes(n * dtype.itemsize)
    if how == 1:
        return bytes(n * dtype.itemsize)
    if dtype.is_floating_point or dtype.is_complex:
        pick = [rng.choice(FLOATS) for _ in range(n)] if how < 4 else [rng.random() for _ in range(n)]
        t = torch.tensor(pick, dtype=torch.float64).to(torch.float32 if dtype.itemsize == 1 else dtype).to(dtype)
        return t.view(torch.uint8).numpy().tobytes() if n else b""
    if dtype is torch.bool:
        return bytes([rng.choice((0, 1, 1, 255)) for _ in range(n)])
    low, high = (-2, 8) if how < 4 else (0, 3)
    far = rng.choice(INTS) if how == 2 else None
    values = [far if far is not None and rng.random() < 0.5 else rng.randint(low, high) for _ in range(n)]
    return b"".join([(v & ((1 << bits) - 1)).to_bytes(dtype.itemsize, "little") for v in values])
