"""Texts of TTIR, and functions that the tests share."""

import re

from wooly_triton import chips
from wooly_triton.guard import guard


def signature(text):
    """Return the entry of a text, and the kinds of its arguments."""
    entry, head = re.search(r"tt\.func public @(\w+)\(([^\n]*)\) attributes", text).groups()
    kinds = re.findall(r"%[\w.]+: (?:!tt\.ptr<(\w+)>|(\w+))", head)
    return entry, tuple([f"*{p}" if p else s for p, s in kinds])


def request(text, target, **options):
    """Return the request to the compiler's worker for a text."""
    entry, args = signature(text)
    options = {"num_stages": 3, "num_warps": 4} | options
    made = {"language": "ttir", "text": text, "entry": entry, "args": args, "block": (1, 1, 1), "target": target}
    return made | {"what": "foreign", "options": sorted(options.items()), "name": "n"}


def guarded(text, claims=None):
    """Insert guards into a text, and check that Triton can read the result."""
    chip = chips.chip("cuda:sm_90")
    compiler = chips.Compiler(chip, {"num_warps": 4})
    plain = compiler.canonical(text)
    entry, args = signature(plain)
    made = guard(plain, entry, args, claims or (1,) * len(args), 128)
    compiler.read(made.text)
    return made
