"""Finds the pointer parameters through which a kernel writes, from its TTIR."""

from __future__ import annotations

import re

from wooly_wis.foreign import MAX_ARGUMENTS


def written(text: str, entry: str) -> frozenset[int]:
    """Indices of the parameters through which a function may write. Follows the pointers through the text.

    If this analysis is not certain, a parameter counts as written. The executor refuses writes through other parameters.
    """
    head = re.search(rf"tt\.func public @{re.escape(entry)}\((.*)\) attributes", text)
    names = re.findall(r"(%[\w$.-]+):", head[1]) if head is not None else []
    if head is None or re.search(r"tt\.(call|descriptor|make_tensor|elementwise_inline_asm)", text):
        return frozenset(range(MAX_ARGUMENTS))
    group: dict[str, str] = {}

    def of(name: str) -> str:
        while name in group:
            name = group[name]
        return name

    found: list[str] = []
    for line in text[head.end() :].splitlines():
        if "!tt.ptr" not in line:
            continue
        has_results = line.lstrip().startswith("%") and "scf." not in line
        defined, _, rest = line.partition(" = ") if has_results else ("", "", line)
        operands = re.findall(r"%[\w$.-]+", rest)
        if "tt.store" in line or "tt.atomic" in line:
            found.append(operands[0])
        elif "tt.load" not in line:
            together = operands[:1] if "tt.addptr" in line else operands
            together += re.findall(r"%[\w$.-]+", defined)
            if re.search(r"scf\.|cf\.|\^bb", line):  # control flow may exchange these pointers
                together.append("passed")
            for name in together[1:]:
                if of(name) != of(together[0]):
                    group[of(name)] = of(together[0])
    groups = {of(name) for name in found}
    return frozenset([k for k, name in enumerate(names) if of(name) in groups])
