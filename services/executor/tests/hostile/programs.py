"""Makes programs of native instructions on views that do not fit: products, chains of kernels, in-place writes, empty tensors.

The same seed gives the same programs. All of them are lawful, because the verifier refuses the others before they can do harm.
"""

import random
from dataclasses import dataclass, field, replace

from wooly_testkit.tape import Tape, Tensor
from wooly_wis.assembly import disassemble, row_major
from wooly_wis.codec import encode_program
from wooly_wis.dtypes import DType
from wooly_wis.errors import WisError
from wooly_wis.oprules import ArgKind
from wooly_wis.optable import TABLE, Family
from wooly_wis.program import Form, Operand, Program, Role, View
from wooly_wis.verifier import verify_program

#: Sizes of products: around the limits of `runtime/products.py`, and small ones.
ROWS = (0, 1, 1, 2, 3, 4, 5, 8, 33, 127, 128, 129, 255, 256, 257, 300)
DEPTHS = (0, 1, 7, 255, 256, 257, 300, 512)
FAST = (1, 1, 4, 5, 8, 33, 127, 128, 256, 257, 300), (256, 257, 300, 512), (512, 1024, 1027, 1536)
COLUMNS = (0, 1, 64, 127, 128, 132, 512, 1000, 1024, 1027, 1028, 1536)
SIZES = (0, 1, 1, 2, 3, 4, 5, 8, 16, 17, 64, 257)
PRODUCTS = ("linear", "linear", "mm", "mm", "addmm", "addmm", "bmm", "baddbmm")
DTYPES = (DType.F32,) * 6 + (DType.F64, DType.BF16, DType.F16, DType.I64, DType.I32, DType.BOOL, DType.U8, DType.C64)
FLOATS = (DType.F32, DType.F32, DType.F32, DType.F64, DType.BF16)
OTHERS = tuple([row.opcode for row in TABLE.values() if row.family is not Family.CONTRACTION])
#: Maximum size of a slot, in bytes, and maximum elements of a result.
LARGEST, MOST = 4 << 20, 1 << 20
#: Attempts to add an instruction, or to change one, before another is chosen.
ATTEMPTS = 6


@dataclass(frozen=True)
class Case:
    """A program with what a run of it needs.

    Attributes:
        name: seed and number.
        program: the program.
        params: params of a run.
        dtypes: for each slot that a run binds, the dtype of its contents.
        edges: positions at which runs stop.
        tame: whether the contents are ordinary numbers.
        repeatable: whether each run has the same bits. They may differ if an instruction writes an element twice, or reads what
            it writes through another view.
        plan: the bytes of its artifact.
    """

    name: str
    program: Program
    params: tuple
    dtypes: dict = field(hash=False)
    edges: tuple
    tame: bool
    repeatable: bool
    plan: bytes = b""

    @property
    def raw(self):
        return encode_program(self.program)

    def tidy(self):
        return self


def case(seed, k):
    """Return the `k`th program of a seed."""
    rng = random.Random(f"{seed} programs {k}")
    while True:
        made = _Making(rng).made(f"{seed}/{k}")
        if made is not None:
            return made


def text(case):
    """Describe a program for a report."""
    return f"program {case.name}, params {list(case.params)}, edges {list(case.edges)}\n{disassemble(case.program)}"


def is_repeatable(form, slots):
    """Whether the bits of an instruction's results do not depend on the order in which the library's threads write."""
    for k, (operand, slot) in enumerate(zip(form.operands, slots, strict=True)):
        if operand.role is Role.IN or operand.view is None:
            continue
        if overlaps(operand.view):
            return False
        for other, (its, on) in enumerate(zip(form.operands, slots, strict=True)):
            if other != k and on == slot and its.view != operand.view:
                return False
    return True


def overlaps(view):
    """Whether two elements of a view may have the same address."""
    reached = 0
    for stride, size in sorted(zip(view.strides, view.sizes, strict=True)):
        if size > 1:
            if stride <= reached:
                return True
            reached += stride * (size - 1)
    return False


class _Making:
    def __init__(self, rng):
        self._rng, self._tape, self._values, self._dtypes = rng, Tape(), [], {}
        self._made = set()

    def made(self, name):
        """Return a program; None: its views reach too far."""
        rng = self._rng
        for _ in range(rng.choice((1, 2, 3, 4, 6, 10))):
            for _ in range(ATTEMPTS):
                try:
                    self._product() if rng.random() < 0.4 else self._other()
                except (WisError, ValueError, IndexError, KeyError, AttributeError):
                    continue  # the row's rules refuse the arguments
                break
        if not self._tape._body:
            return None
        if rng.random() < 0.3:
            for t in rng.sample(self._values, min(len(self._values), rng.randrange(1, 3))):
                if t.slot in self._made:
                    self._tape.free(t)
                    self._made.discard(t.slot)
        program, slots = self._tape.program()
        program = self._changed(program)
        try:
            facts = verify_program(program)
        except WisError:
            return None
        if max(facts.slot_bytes) > LARGEST or len(program.param_kinds) != len(self._tape.params):
            return None
        n = len(program.body)
        edges = tuple(sorted(rng.sample(range(1, n), min(n - 1, rng.randrange(4))))) if n > 1 else ()
        dtypes = {slots[s]: d for s, d in self._dtypes.items() if s in slots}
        dtypes = {s: d for s, d in dtypes.items() if facts.slot_alloc[s] is None}
        repeatable = all(is_repeatable(program.forms[i.form], i.slots) for i in program.body)
        return Case(name, program, tuple(self._tape.params), dtypes, edges, rng.random() < 0.7, repeatable)

    # -- instructions --------------------------------------------------------------------------------------------------

    def _product(self):
        rng = self._rng
        opcode, dtype = rng.choice(PRODUCTS), rng.choice(FLOATS)
        m, k, n = rng.choice(ROWS), rng.choice(DEPTHS), rng.choice(COLUMNS)
        if rng.random() < 0.5:  # a product that is not computed by one call of the BLAS, unless its views are unusual
            opcode, dtype = rng.choice(PRODUCTS[:6]), DType.F32
            m, k, n = rng.choice(FAST[0]), rng.choice(FAST[1]), rng.choice(FAST[2])
        batch = (rng.choice((0, 1, 2, 3)),) if opcode.endswith("bmm") else ()
        if opcode == "linear":
            lead = rng.choice(((m,), (1, m), (m, 1), (), (2, m // 2), (m, 1, 1)))
            args = [self._tensor(dtype, (*lead, k)), self._tensor(dtype, (n, k))]
            if rng.random() < 0.5:
                args.append(self._tensor(dtype, (n,)))
        else:
            args = [self._tensor(dtype, (*batch, m, k)), self._tensor(dtype, (*batch, k, n))]
            if opcode.startswith(("add", "badd")):
                args.insert(0, self._tensor(dtype, rng.choice(((n,), (n,), (m, n), (1, n), (m, 1), (1,), ()))))
                if rng.random() < 0.3:
                    args += [rng.choice((0, 1, 0.5, 2)), rng.choice((0, 1, -1.0))]
        self._keep(self._tape.ops(opcode, *args))

    def _other(self):
        rng = self._rng
        row = (
            TABLE[rng.choice(OTHERS)]
            if rng.random() < 0.6
            else TABLE[rng.choice(("add", "mul", "relu", "gelu", "sum"))]
        )
        sizes = tuple([rng.choice(SIZES) for _ in range(rng.choice((0, 1, 2, 2, 3, 4)))])
        if self._values and rng.random() < 0.7:
            sizes = rng.choice(self._values).view.sizes
        dtype = rng.choice(DTYPES)
        args, into = [], None
        for a in row.args:
            if not a.required and rng.random() < 0.5:
                break
            kind = a.kind
            if a.name in row.truths:
                args.append(self._tensor(DType.BOOL, sizes))
            elif a.name in row.indices:
                lead = (rng.choice(SIZES),) if row.opcode == "index_select" else sizes
                args.append(self._tensor(rng.choice((DType.I64, DType.I32)), lead))
            elif kind is ArgKind.TENSORS:
                args.append(tuple([self._tensor(dtype, sizes) for _ in range(rng.randrange(1, 4))]))
            elif kind is ArgKind.TENSOR or (kind is ArgKind.EITHER and (not args or rng.random() < 0.7)):
                fitting = sizes if rng.random() < 0.8 else tuple([s if rng.random() < 0.6 else 1 for s in sizes])
                args.append(self._tensor(dtype, fitting))
            elif kind in (ArgKind.NUMBER, ArgKind.EITHER):
                args.append(rng.choice((0, 1, -1, 2, 3, 0.5, 1.0, -2.5, 1e-5, True, float("nan"), 1 << 40)))
            elif kind is ArgKind.INT:
                args.append(rng.randrange(-max(len(sizes), 1), max(len(sizes), 1)))
            elif kind is ArgKind.INTS:
                dims = rng.sample(range(len(sizes)), rng.randrange(len(sizes) + 1))
                args.append(tuple(sizes[-1:] if row.opcode == "layer_norm" else dims))
            elif kind is ArgKind.BOOL:
                args.append(rng.random() < 0.5)
            else:
                args.append(rng.choice(DTYPES))
        if row.opcode == "embedding" and len(args) > 1:
            args[0] = self._tensor(dtype, (rng.choice(SIZES), rng.choice(SIZES)))
        in_place = len(row.results) == 1 and rng.random() < 0.2 and isinstance(args[0], Tensor)
        if in_place:
            into = args[0]
        self._keep(self._tape.ops(row.opcode, *args, into=into))
        if rng.random() < 0.1:
            self._keep([self._tape.copy(self._any(), rng.choice(DTYPES))])

    def _keep(self, results):
        for t in results:
            if t.view.numel > MOST:
                raise ValueError("too large")
            self._values.append(t)
            if t.slot not in self._dtypes:
                self._made.add(t.slot)
                self._dtypes[t.slot] = t.view.dtype

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _any(self):
        return self._rng.choice(self._values) if self._values else self._tensor(DType.F32, (4,))

    def _tensor(self, dtype, sizes):
        """Return a view with these sizes, of an earlier tensor or of a new input."""
        rng = self._rng
        fitting = [t for t in self._values if t.view.dtype is dtype and t.view.sizes == sizes]
        if fitting and rng.random() < 0.7:
            return rng.choice(fitting)
        strides, offset = self._layout(sizes)
        view = View(dtype, tuple(sizes), strides, offset * dtype.itemsize)
        alike = [
            t for t in self._values if t.view.dtype is dtype and (t.slot not in self._made or t.view.end >= view.end)
        ]
        if alike and rng.random() < 0.35:
            return Tensor(rng.choice(alike).slot, view)  # another view of memory that the program uses
        made = self._tape.input(dtype, *sizes)
        self._dtypes[made.slot] = dtype
        found = Tensor(made.slot, view)
        self._values.append(found)
        return found

    def _layout(self, sizes):
        """Return strides and an offset: dense, transposed, padded, repeated, overlapping, or of no meaning."""
        rng, strides = self._rng, list(row_major(tuple(sizes)))
        how = rng.randrange(14)
        if how < 5 or not strides:
            pass
        elif how < 7:
            strides = list(reversed(row_major(tuple(reversed(sizes)))))
        elif how == 7 and len(sizes) > 1:
            pad = rng.choice((1, 4, 8))
            strides = [s + pad if s > 1 else s for s in strides]
        elif how == 8:
            strides[rng.randrange(len(strides))] = 0
        elif how == 9:
            strides = [rng.choice((0, 1))] * len(strides)
        elif how == 10:
            strides = [max(s - 1, 1) for s in strides]
        elif how == 11:
            strides = [2 * s for s in strides]
        elif how == 12:
            order = list(range(len(strides)))
            rng.shuffle(order)
            strides = [strides[k] for k in order]
        else:
            strides[rng.randrange(len(strides))] = rng.choice((0, 1, 2, 3, 7, 64, 300))
        return tuple(strides), rng.choice((0, 0, 0, 1, 3, 16))

    # -- changes of the whole program ----------------------------------------------------------------------------------

    def _changed(self, program):
        """Change a few operands; a change that the verifier refuses is undone."""
        rng = self._rng
        for _ in range(rng.choice((0, 0, 1, 2, 4))):
            for _ in range(ATTEMPTS):
                k = rng.randrange(len(program.forms))
                form = program.forms[k]
                if form.opcode in ("alloc", "free"):
                    continue
                changed = self._changed_form(form)
                if changed in program.forms:
                    continue
                other = replace(program, forms=(*program.forms[:k], changed, *program.forms[k + 1 :]))
                try:
                    verify_program(other)
                except WisError:
                    continue
                program = other
                break
        return program

    def _changed_form(self, form: Form):
        rng, operands = self._rng, list(form.operands)
        k = rng.randrange(len(operands))
        role, view = operands[k].role, operands[k].view
        if view is None:
            return form
        how = rng.randrange(5)
        if how == 0:
            strides, offset = self._layout(view.sizes)
            view = View(view.dtype, view.sizes, strides, offset * view.dtype.itemsize)
        elif how == 1:
            sizes = tuple([rng.choice((s, s, 0, 1, s + 1, max(s - 1, 0))) for s in view.sizes])
            view = View(view.dtype, sizes, row_major(sizes), view.offset)
        elif how == 2:
            sizes = (1, *view.sizes) if rng.random() < 0.5 else view.sizes[1:]
            view = View(view.dtype, sizes, row_major(sizes), view.offset)
        elif how == 3:
            view = View(rng.choice(DTYPES), view.sizes, view.strides, 0)
        else:
            role = rng.choice((Role.IN, Role.INOUT))
        operands[k] = Operand(role, view)
        return replace(form, operands=tuple(operands))
