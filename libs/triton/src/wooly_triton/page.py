"""Writes the reference page of TTIR: ``python -m wooly_triton.page > docs/reference/ttir.md``."""

from __future__ import annotations

from wooly_triton.ops import ELEMENTWISE, REFUSED, STRUCTURAL
from wooly_triton.text import MAX_NUMEL, MAX_OPS, MAX_TEXT, SCALAR_TYPES
from wooly_triton.writer import MAX_TENSOR_BYTES


def page() -> str:
    """Return the page as Markdown."""
    rows = {name: ("lowered", row.says) for name, row in ELEMENTWISE.items()}
    rows |= {name: ("lowered", says) for name, says in STRUCTURAL.items()}
    rows |= {name: ("refused", says) for name, says in REFUSED.items()}
    out = [
        "# Operations of TTIR",
        "",
        "This page is generated from the tables of `wooly-triton` by `make docs`; a test compares them. An",
        "operation that the table does not list is refused by its name.",
        "",
        f"Elements: {', '.join(f'`{t}`' for t in SCALAR_TYPES)}. Smaller floating point is computed in f32 and rounded after",
        "each operation.",
        "",
        f"Limits: {MAX_TEXT:,} characters, {MAX_OPS:,} operations, {MAX_NUMEL:,} elements of a tensor, "
        f"{MAX_TENSOR_BYTES >> 20} MiB for the tensors of one program.",
        "",
        "The table is valid for CPUs. On GPUs, Triton itself compiles the text, with a bounds check before",
        "each access ([ADR 28](../adr/0028-write-bounds-checks-into-tritons-text-on-gpus.md)). GPUs also run",
        "`tt.dot_scaled`, `tt.int_to_ptr` and `tt.ptr_to_int`. GPUs refuse `tt.atomic_load`,",
        "`tt.atomic_store`, jumps back between blocks and the other operations that the table refuses. A",
        "launch with `unchecked=True` of a tenant with the permission `opaque_kernels` may use them all the",
        "same. On GPUs, an index out of the range of `tt.gather` wraps.",
        "",
        "| operation | state | |",
        "|---|---|---|",
        *[f"| `{name}` | {state} | {says} |" for name, (state, says) in sorted(rows.items())],
    ]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    print(page(), end="")
