"""The entry point of `cuda-c` for compilers: what they call here (`wooly_wis.languages.CompiledLanguage`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from wooly_wis.dtypes import BY_LABEL, DType
from wooly_wis.foreign import SHARED, ForeignCode, Image, Parameter
from wooly_wis.languages import ForeignError, Lowered, Request

from wooly_cuda_c.printing.dialects import DIALECTS, OPENCL, Dialect
from wooly_cuda_c.printing.translate import BUFFER, Translated, translate
from wooly_cuda_c.printing.types import Scalar
from wooly_cuda_c.syntax.errors import CudaSourceError

#: The option of a launch with the template arguments, as text. The option `SHARED` is the size of `extern __shared__` arrays.
TEMPLATE: Final = "template"


def translated(request: Request, dialect: Dialect) -> tuple[Translated, tuple[Parameter, ...]]:
    """Print a kernel in a dialect of C, and return it with its parameters.

    Raises:
        ForeignError: the source uses unsupported or forbidden constructs.
    """
    shared, template = request.options.get(SHARED, 0), request.options.get(TEMPLATE, "")
    if not isinstance(shared, int) or shared < 0 or not isinstance(template, str):
        raise ForeignError(f"the option {SHARED} must be a number of bytes, and {TEMPLATE} a text")
    unknown = request.options.keys() - {SHARED, TEMPLATE}
    if unknown:
        raise ForeignError(f"CUDA C has no option {min(unknown)}; it has {SHARED} and {TEMPLATE}")
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
            together=not request.careful,
        )
    except CudaSourceError as e:
        raise ForeignError(f"CUDA C, {e}") from e
    parameters = [
        Parameter(None if isinstance(a, str) else a, isinstance(a, str), writes)
        for a, writes in zip(scalars, made.writes, strict=True)
    ]
    return made, tuple(parameters)


def for_cpu(request: Request) -> Lowered:
    """Translate a kernel in CUDA C to OpenCL C.

    Raises:
        ForeignError: the source uses unsupported or forbidden constructs.
    """
    made, parameters = translated(request, OPENCL)
    return Lowered(made.text, made.entry, parameters, made.places)


def for_gpu(request: Request, target: str, build: Callable[[str], bytes]) -> ForeignCode:
    """Print a kernel in the C of a GPU's vendor, and compile it with the vendor's compiler.

    Args:
        request: the kernel to compile.
        target: like ``cuda:sm_90`` or ``hip:gfx942``.
        build: the vendor's compiler.

    Raises:
        ForeignError: the source uses unsupported or forbidden constructs.
        WisError: the vendor's compiler is not installed, or rejects the printed text.
    """
    made, parameters = translated(request, DIALECTS[target.partition(":")[0]])
    passed = ["status"]
    for k, p in enumerate(parameters):
        passed += [f"address {k}", f"length {k} 1"] if p.buffer else [f"value {k}"]
    image = Image(made.entry, tuple(passed), 0, 0, 0, (1,) * len(parameters), build(made.text))
    return ForeignCode(made.entry, parameters, made.places, b"", (image,))


def _scalar(dtype: DType) -> Scalar:
    """Return the type in which a launch passes a number.

    Raises:
        ForeignError: CUDA C has no such type.
    """
    if dtype.kind not in ("bool", "int", "uint", "float") or (dtype.itemsize < 4 and dtype.kind == "float"):
        raise ForeignError(f"a launch cannot pass a number of type {dtype.label} to CUDA C")
    return Scalar("b1" if dtype is DType.BOOL else dtype.label)
