"""TTIR for GPUs in which every access is within the launch's buffers: the text, with guards written into it.

An access through pointers that are an argument plus offsets is written anew as that argument plus one offset, which is
compared with the number of elements that the launch has there; any other pointer is compared with where buffers begin and end.
What fails is masked off: it reads 0, writes nothing, and is told in the status words. What Triton's compilers would be free to
assume (no overflow, no division by 0, alignments that a text claims) is taken out or made sure of, for a compiler that may
assume anything may take a guard away.

The text must be as MLIR prints it, and is read with `text`; what has no rule here is refused by its name.
"""

from wooly_triton.guard.function import Guarded, guard
from wooly_triton.guard.signature import check_arguments, claims_of, names_of

__all__ = ["Guarded", "check_arguments", "claims_of", "guard", "names_of"]
