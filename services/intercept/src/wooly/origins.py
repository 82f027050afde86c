"""Which Python line of a script an operation comes from."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType

from wooly import native
from wooly.python_private import frame_at

#: Origin of one recorded instruction: code object and bytecode offset of the Python line.
Origin = tuple[CodeType, int]

#: Whether a code object belongs to a library, by `id`, because some code objects of Dynamo have no hash. `_codes_seen` keeps the
#: code objects alive, so their ids are not reused.
_library_code: dict[int, bool] = {}
_codes_seen: list[CodeType] = []
_GENERATED = ("<frozen", "<eval_with_key>")
_library_roots: tuple[str, ...] = _GENERATED


def set_library_roots(roots: tuple[str, ...]) -> None:
    """Set the folders of libraries (torch, Wooly). Code in them is never reported as the origin of an operation."""
    global _library_roots
    _library_roots = (*_GENERATED, *roots)
    _library_code.clear()
    _codes_seen.clear()
    if native.module is not None:
        native.module.forget_origins()


def add_library_root(root: str) -> None:
    """Add a folder to those of `set_library_roots`."""
    if root not in _library_roots:
        set_library_roots((*_library_roots, root))


def is_library(code: CodeType) -> bool:
    """Whether a code object belongs to a library."""
    _codes_seen.append(code)
    known = _library_code[id(code)] = code.co_filename.startswith(_library_roots)
    return known


def find_origin(depth: int = 2) -> Origin:
    """The innermost Python line on the stack that is not in a library.

    Args:
        depth: number of innermost frames, this function's included, that are not asked.
    """
    try:
        frame: FrameType | None = frame_at(depth)
    except ValueError:  # the caller was called by a thread of PyTorch that runs no other Python
        frame = frame_at(0)
    first = frame
    known = _library_code
    while frame is not None:
        code = frame.f_code
        library = known.get(id(code))
        if library is None:
            library = is_library(code)
        if not library:
            return code, frame.f_lasti
        frame = frame.f_back
    assert first is not None
    return first.f_code, first.f_lasti


#: `find_origin`, in C++ if it can be.
origin: Callable[..., Origin] = find_origin
if native.module is not None:
    native.module.ask_for_libraries(is_library)
    origin = native.module.origin


def line_of(where: Origin) -> int:
    """Number of the line of an origin."""
    code, last = where
    for start, end, number in code.co_lines():
        if start <= last < end and number is not None:
            return number
    return code.co_firstlineno


def describe_origin(where: Origin) -> str:
    """``file:line`` of an origin."""
    code, _ = where
    return f"{code.co_filename}:{line_of(where)} in {code.co_name}"
