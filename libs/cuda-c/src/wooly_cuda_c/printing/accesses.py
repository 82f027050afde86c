"""Helper functions of the printed text: checked loads, stores and atomics. Each is printed once per type, if it is used."""

from __future__ import annotations

from wooly_cuda_c.printing.dialects import Dialect
from wooly_cuda_c.printing.types import F32, F64, Scalar, Struct, Type, Vector

#: Parameters that every printed function has: the status words, the block's memory, and the number of the thread.
CONTEXT = "W_G int *w_status, {local} w_u8 *w_shared, w_u32 w_t"
PASS = "w_status, w_shared, w_t"
LOAD, STORE, ATOMIC, ASSERTION, TRAP = 1, 2, 3, 4, 5


def _beyond(kind: Type) -> str:
    """Return a test for an object out of bounds. Offsets are multiples of a power of two, even if an index wraps."""
    if kind.size & (kind.size - 1):
        return f"p.at >= p.n || p.n - p.at < {kind.size}u"
    return "p.at >= p.n"


class Helpers:
    """The helper functions by name, in the order of their first use.

    Args:
        dialect: the dialect of C.
        threads: number of threads of a block.
    """

    def __init__(self, dialect: Dialect, threads: int) -> None:
        self._dialect = dialect
        self._threads = threads
        self._texts: dict[str, str] = {}

    @property
    def text(self) -> str:
        """The text of all helpers."""
        return "".join(self._texts.values())

    def _add(self, name: str, result: str, params: str, body: str) -> str:
        if name not in self._texts:
            context = CONTEXT.format(local=self._dialect.spaces["l"])
            self._texts[name] = f"W_FN {result} {name}({context}, {params}) {{\n{body}}}\n"
        return name

    def _zero(self, kind: Type) -> tuple[str, str]:
        """Return a declaration of a zero value, and its name."""
        if isinstance(kind, Vector | Struct):
            return f"  {kind.text} z = {{0}};\n", "z"
        return "", "0"

    def load(self, space: str, kind: Type) -> str:
        """A function that reads an object; out of bounds it returns zeros."""
        declared, zero = self._zero(kind)
        word = self._dialect.spaces[space]
        return self._add(
            f"w_load_{space}_{kind.text}",
            kind.text,
            f"w_{space}p p, int place",
            f"{declared}  if ({_beyond(kind)}) {{ w_fault(w_status, {LOAD}, place); return {zero}; }}\n"
            f"  return *({word} {kind.text} *)(p.base + p.at);\n",
        )

    def store(self, space: str, kind: Type) -> str:
        """A function that writes an object and returns the value; out of bounds it writes nothing."""
        word = self._dialect.spaces[space]
        return self._add(
            f"w_store_{space}_{kind.text}",
            kind.text,
            f"w_{space}p p, {kind.text} v, int place",
            f"  if ({_beyond(kind)}) {{ w_fault(w_status, {STORE}, place); return v; }}\n"
            f"  *({word} {kind.text} *)(p.base + p.at) = v;\n  return v;\n",
        )

    def near(self, name: str, how: str, space: str, kind: Type) -> None:
        """A macro like a load or store, for an address that is known to be within bounds.

        It is no function, because PoCL then forgets that the loop over the threads has independent iterations.
        """
        place = self._place(space, kind)
        if how == "load":
            self._near(name, "p, place", f"({place})")
        else:
            self._near(name, "p, v, place", f"({place} = (v))")

    def near_update(self, name: str, space: str, kind: Scalar, by: Scalar, new: str) -> None:
        """A macro like an `update` that returns the new value, for an address that is known to be within bounds."""
        place, made = self._place(space, kind), name.replace("w_", "w_made_", 1)
        self._texts.setdefault(made, f"W_FN {kind.text} {made}({kind.text} old, {by.text} v) {{ return {new}; }}\n")
        self._near(name, "p, v, place", f"({place} = {made}({place}, (v)))")

    def _near(self, name: str, params: str, text: str) -> None:
        name = name.replace("w_", "w_near_", 1)
        self._texts.setdefault(name, f"#define {name}({params}) {text}\n")

    def _place(self, space: str, kind: Type) -> str:
        word, name = self._dialect.spaces[space], f"w_address_{space}"
        self._texts.setdefault(name, f"W_FN {word} w_u8 *{name}(w_{space}p p) {{ return p.base + p.at; }}\n")
        return f"*({word} {kind.text} *){name}(p)"

    def update(self, space: str, kind: Scalar, op: str, by: Scalar, new: str, before: bool) -> str:
        """A function that updates a number in memory. It returns the new value, or the old one if `before` is true.

        Args:
            space: memory space of the number.
            kind: type of the number.
            new: text that computes the new value from ``old`` and ``v``.
            op: word for the operation, for the function's name.
            by: type of `v`.
            before: whether to return the old value.
        """
        load, store = self.load(space, kind), self.store(space, kind)
        return self._add(
            f"w_update_{op}_{space}_{kind.name}_{by.name}{'_before' if before else ''}",
            kind.text,
            f"w_{space}p p, {by.text} v, int place",
            f"  {kind.text} old = {load}({PASS}, p, place);\n  {kind.text} made = {new};\n"
            f"  if (p.at < p.n) {store}({PASS}, p, made, place);\n  return {'old' if before else 'made'};\n",
        )

    def atomic(self, space: str, kind: Scalar, what: str) -> str:
        """A function with an atomic operation, which returns the old number; out of bounds it does nothing and returns 0."""
        params = f"w_{space}p p, {kind.text} {'c, ' + kind.text + ' ' if what == 'compare' else ''}v, int place"
        return self._add(
            f"w_atomic_{what}_{space}_{kind.name}",
            kind.text,
            params,
            f"  if (p.at >= p.n) {{ w_fault(w_status, {ATOMIC}, place); return 0; }}\n"
            + self._atomic(space, kind, what),
        )

    def _atomic(self, space: str, kind: Scalar, what: str) -> str:
        dialect, word = self._dialect, self._dialect.spaces[space]
        # CUDA's 64-bit atomics take unsigned numbers; only minimum and maximum also take signed ones.
        unsigned = kind.name == "i64" and dialect.name == "cuda" and what not in ("min", "max")
        text = "w_u64" if unsigned else kind.text
        native = kind in (F32, F64)
        if dialect.name == "cuda" and text == "w_u64":
            text = "unsigned long long"
        place = f"({'volatile ' if dialect.name == 'opencl' else ''}{word} {text} *)(p.base + p.at)"
        wide = "64" if kind.size == 8 and dialect.name == "opencl" else ""

        def native_call(name: str, at: str = "q") -> str:
            return dialect.atomics[name + wide].format(q=at, v=f"({text})v", c=f"({text})c", t=text)

        if native and what == "add" and dialect.native_floats:
            return f"  {kind.text} *q = {place};\n  return {native_call('add')};\n"
        if native or what in ("increase", "decrease"):
            return self._by_comparing(space, kind, what)
        if what == "compare" and dialect.name == "hip":
            return (
                f"  {word} {text} *q = {place};\n  {text} seen = c;\n"
                "  __hip_atomic_compare_exchange_strong(q, &seen, v, __ATOMIC_RELAXED, __ATOMIC_RELAXED,"
                " __HIP_MEMORY_SCOPE_AGENT);\n"
                "  return seen;\n"
            )
        return (
            f"  {'volatile ' if dialect.name == 'opencl' else ''}{word} {text} *q = {place};\n"
            f"  return ({kind.text}){native_call(what)};\n"
        )

    def _by_comparing(self, space: str, kind: Scalar, what: str) -> str:
        """The body of an atomic operation as a loop of compare-and-swap."""
        bits = "u64" if kind.size == 8 else "u32"
        compare = self.atomic(space, Scalar(bits), "compare")
        to, back = (f"w_as_{bits}_{kind.name}", f"w_as_{kind.name}_{bits}") if kind.real else ("", "")
        new = {
            "add": "old + v",
            "exchange": "v",
            "increase": "old >= v ? 0u : old + 1u",
            "decrease": "old == 0u || old > v ? v : old - 1u",
        }[what]
        load = self.load(space, Scalar(bits))
        return (
            f"  w_{bits} seen = {load}({PASS}, p, place);\n"
            f"  for (;;) {{\n    {kind.text} old = {back}(seen);\n    {kind.text} made = {new};\n"
            f"    w_{bits} found = {compare}({PASS}, p, seen, {to}(made), place);\n"
            "    if (found == seen) return old;\n    seen = found;\n  }\n"
        )

    def extreme(self, kind: Scalar, what: str) -> str:
        """A function for the smaller or the larger of two integers."""
        name = f"w_{what}_{kind.name}"
        sign = "<" if what == "min" else ">"
        self._texts.setdefault(
            name, f"W_FN {kind.text} {name}({kind.text} a, {kind.text} b) {{ return a {sign} b ? a : b; }}\n"
        )
        return name

    # -- between threads -----------------------------------------------------------------------------------------------

    def lane(self, how: str) -> str:
        """A function that returns the lane whose value a thread gets, from its own lane, the distance and the width."""
        other = {
            "": "(lane & ~(width - 1u)) | (by & (width - 1u))",
            "_up": "(lane & (width - 1u)) >= by ? lane - by : lane",
            "_down": "(lane & (width - 1u)) + by < width ? lane + by : lane",
            "_xor": "((lane ^ by) & ~(width - 1u)) <= (lane & ~(width - 1u)) ? lane ^ by : lane",
        }[how]
        name = f"w_lane{how or '_of'}"
        self._texts.setdefault(
            name,
            f"W_FN w_u32 {name}(w_u32 lane, w_u32 by, w_u32 width) {{\n"
            f"  if (width == 0u || width > 32u || (width & (width - 1u))) width = 32u;\n  return ({other}) & 31u;\n}}\n",
        )
        return name

    def moved(self, kind: Scalar, how: str) -> str:
        """A function that gives each lane of a warp another lane's value, for a distance that is the same in all lanes."""
        loop = '_Pragma("clang loop vectorize(assume_safety)")\n  '
        near = {
            "": f"  {loop}for (w_u32 k = 0u; k < 32u; k++) to[k] = of[by];\n",
            "_down": f"  {loop}for (w_u32 k = 0u; k < 32u - by; k++) to[k] = of[k + by];\n"
            "  for (w_u32 k = 32u - by; k < 32u; k++) to[k] = of[k];\n",
            "_up": "  for (w_u32 k = 0u; k < by; k++) to[k] = of[k];\n"
            f"  {loop}for (w_u32 k = by; k < 32u; k++) to[k] = of[k - by];\n",
            "_xor": "  for (w_u32 k = 0u; k < 32u; k++) to[k] = of[k ^ by];\n",
        }[how]
        name, word, lane = f"w_moved{how}_{kind.name}", self._dialect.spaces["l"], self.lane(how)
        far = f"for (w_u32 k = 0u; k < 32u; k++) to[k] = of[{lane}(k, by, 32u)];"
        self._texts.setdefault(
            name,
            f"W_FN void {name}({word} {kind.text} *to, const {word} {kind.text} *of, w_u32 by) {{\n"
            f"  if (by >= 32u) {{ {far} return; }}\n{near}}}\n",
        )
        return name

    def shuffle(self, kind: Scalar, how: str) -> str:
        """A function that returns the value of another thread of the warp, on devices with subgroups."""
        lane = self.lane(how)
        body = f"  w_u32 from = {lane}(w_lane(), by, width);\n"
        if kind.size == 4:
            to, back = ("w_as_u32_f32", "w_as_f32_u32") if kind.real else ("(w_u32)", f"({kind.text})")
            body += f"  return {back}(w_shuffle32(mask, {to}(v), from));\n"
        else:
            to, back = ("w_as_u64_f64", "w_as_f64_u64") if kind.real else ("(w_u64)", f"({kind.text})")
            body += (
                f"  w_u64 bits = {to}(v);\n  w_u64 low = w_shuffle32(mask, (w_u32)bits, from);\n"
                f"  w_u64 high = w_shuffle32(mask, (w_u32)(bits >> 32), from);\n  return {back}(low | (high << 32));\n"
            )
        return self._add(
            f"w_shuffle{how}_{kind.name}", kind.text, f"w_u32 mask, {kind.text} v, w_u32 by, w_u32 width", body
        )

    def folded(self, kind: Scalar, what: str) -> str:
        """A function that combines values of the masked threads of a warp, or returns the mask of threads with an equal value."""
        least, most = {"i32": ("(-2147483647 - 1)", "2147483647"), "u32": ("0u", "0xffffffffu")}.get(
            kind.name, ("", "")
        )
        found, begin, step = {
            "add": (kind.text, "0", f"({kind.text})((w_u32)found + (w_u32)x)"),
            "min": (kind.text, most, "x < found ? x : found"),
            "max": (kind.text, least, "x > found ? x : found"),
            "and": (kind.text, "0xffffffffu", "found & x"),
            "or": (kind.text, "0u", "found | x"),
            "xor": (kind.text, "0u", "found ^ x"),
            "match": ("w_u32", "0u", "x == mine ? found | (1u << k) : found"),
        }[what]
        if self._dialect.subgroups:
            if kind.size == 8:
                low, high = "(w_u32)(w_u64)mine", "(w_u32)((w_u64)mine >> 32)"
                of = f"(w_u64)w_shuffle32(mask, {low}, k) | (w_u64)w_shuffle32(mask, {high}, k) << 32"
            else:
                of = "w_shuffle32(mask, (w_u32)mine, k)"
            params, there, own = f"{kind.text} mine", "1", ""
        else:
            params, there = f"{self._dialect.spaces['l']} {kind.text} *all", f"(w_t & ~31u) + k < {self._threads}u"
            of, own = "all[(w_t & ~31u) + k]", f"  {kind.text} mine = all[w_t];\n  (void)mine;\n"
        return self._add(
            f"w_folded_{what}_{kind.name}",
            found,
            f"w_u32 mask, {params}",
            f"{own}  {found} found = {begin};\n  for (w_u32 k = 0u; k < 32u; k++) {{\n"
            f"    if (!((mask >> k) & 1u) || !({there})) continue;\n"
            f"    {kind.text} x = ({kind.text})({of});\n    found = {step};\n  }}\n  return found;\n",
        )

    def ballot(self) -> str:
        """A function that returns one bit per thread of the warp."""
        if self._dialect.subgroups:
            return self._add("w_vote", "w_u32", "w_u32 mask, int v", "  return w_ballot(mask, v);\n")
        return self._add(
            "w_vote",
            "w_u32",
            f"w_u32 mask, {self._dialect.spaces['l']} w_b1 *all",
            "  w_u32 found = 0u;\n  for (w_u32 k = 0u; k < 32u; k++)\n"
            f"    if ((w_t & ~31u) + k < {self._threads}u && all[(w_t & ~31u) + k]) found |= 1u << k;\n  return found & mask;\n",
        )

    def count(self) -> str:
        """A function that counts the threads of the block whose value is true."""
        return self._add(
            "w_count",
            "w_i32",
            f"{self._dialect.spaces['l']} w_b1 *all",
            f"  w_i32 found = 0;\n  for (w_u32 k = 0u; k < {self._threads}u; k++) found += all[k];\n  return found;\n",
        )
