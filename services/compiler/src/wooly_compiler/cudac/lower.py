"""CUDA C for `wooly_compiler.foreign`: the ABI is in docs/reference/foreign-kernels.md."""

from __future__ import annotations

from wooly_wis.cudac.errors import CudaSourceError
from wooly_wis.dtypes import BY_LABEL, DType
from wooly_wis.foreign import Parameter

from wooly_compiler.cudac.dialects import OPENCL, Dialect
from wooly_compiler.cudac.translate import BUFFER, Translated, translate
from wooly_compiler.cudac.types import Scalar
from wooly_compiler.errors import ForeignError
from wooly_compiler.foreign import Lowered, Request

#: Options of a launch: bytes of `extern __shared__` arrays, and template arguments as they are written.
SHARED, TEMPLATE = "shared", "template"


def translated(request: Request, dialect: Dialect) -> tuple[Translated, tuple[Parameter, ...]]:
    """A kernel printed in one C, and its parameters.

    Raises:
        ForeignError: the source is not understood, or does what cannot be allowed.
    """
    shared, template = request.options.get(SHARED, 0), request.options.get(TEMPLATE, "")
    if not isinstance(shared, int) or shared < 0 or not isinstance(template, str):
        raise ForeignError(f"options {SHARED} and {TEMPLATE} are a number of bytes and a text")
    unknown = request.options.keys() - {SHARED, TEMPLATE}
    if unknown:
        raise ForeignError(f"CUDA C has no option {min(unknown)}")
    scalars = [BUFFER if a.startswith("*") else BY_LABEL[a] for a in request.args]
    arguments = [a if isinstance(a, str) else _scalar(a).name for a in scalars]
    try:
        made = translate(
            request.text,
            request.entry,
            arguments,
            request.block,
            template=template,
            shared=int(shared),
            dialect=dialect,
        )
    except CudaSourceError as e:
        raise ForeignError(f"CUDA C, {e}") from e
    parameters = [
        Parameter(None if isinstance(a, str) else a, isinstance(a, str), writes)
        for a, writes in zip(scalars, made.writes, strict=True)
    ]
    return made, tuple(parameters)


def lower(request: Request) -> Lowered:
    """A kernel in CUDA C as OpenCL C.

    Raises:
        ForeignError: the source is not understood, or does what cannot be allowed.
    """
    made, parameters = translated(request, OPENCL)
    return Lowered(made.text, made.entry, parameters, made.places)


def _scalar(dtype: DType) -> Scalar:
    """The type in which a launch gives a number.

    Raises:
        ForeignError: none.
    """
    if dtype.kind not in ("bool", "int", "uint", "float") or (dtype.itemsize < 4 and dtype.kind == "float"):
        raise ForeignError(f"CUDA C takes no {dtype.label} as a number")
    return Scalar("b1" if dtype is DType.BOOL else dtype.label)
