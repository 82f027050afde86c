"""Inserts guards into TTIR for GPUs, so that every access is within the launch's buffers.

If the pointers of an access are an argument plus offsets, the access is rewritten as this argument plus one offset, and the guard
compares the offset with the buffer's number of elements. For other pointers, the guard compares addresses with the buffers' ends.
A failed check masks the element: it reads 0, writes nothing, and is reported in the status words. Triton's compilers may assume
that there is no overflow or division by 0, and that claimed alignments hold. Such assumptions could remove a guard. So the guards
remove each claim or enforce it.

The text must be as MLIR prints it; `text` reads it. An operation without a rule here is rejected by its name.
"""

from wooly_triton.guard.function import Guarded, guard
from wooly_triton.guard.signature import check_arguments, claims_of, names_of

__all__ = ["Guarded", "check_arguments", "claims_of", "guard", "names_of"]
