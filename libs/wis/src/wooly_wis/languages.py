"""Languages of foreign kernels as optional distributions: the interface of a language, and how processes find its distribution.

A distribution declares one module per language as an entry point. The entry point's name is the name of the language
(`wooly_wis.foreign.LANGUAGES`):

    [project.entry-points."wooly.compiler.languages"]    the module has the functions of `CompiledLanguage`
    [project.entry-points."wooly.client.languages"]      the module has the functions of `ReadLanguage`

The module must be in a package; the package's sources are part of the compiler's version. The module is imported at the first
request for a kernel in its language. ADR 22 defines the kernels themselves.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from wooly_wis.errors import WisError
from wooly_wis.foreign import ForeignCode, Parameter

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: Groups of entry points: modules that compile a language, and modules that clients use to read it.
COMPILER: Final = "wooly.compiler.languages"
CLIENT: Final = "wooly.client.languages"
#: The distribution that provides each language. The error about a missing language names it.
DISTRIBUTIONS: Final[Mapping[str, str]] = {"cuda-c": "wooly-cuda-c", "ttir": "wooly-triton"}


class ForeignError(WisError):
    """A foreign kernel cannot be compiled. The message names the place in the kernel's text."""

    code = "wis.foreign"


class MissingLanguageError(ForeignError):
    """The distribution of a language is not installed. After the installation, the same request can succeed."""

    code = "wis.language_missing"
    retryable = True


@dataclass(frozen=True, slots=True)
class Request:
    """A request to compile one kernel.

    Attributes:
        text: the source.
        entry: name of the function.
        args: per argument: ``*f32`` for a buffer of f32 elements, or the dtype of a scalar.
        block: threads of a block, along each dimension.
        options: hints and requirements for the compiler.
        careful: whether a compiler crashed on the usual translation, so that a simpler one is needed.
    """

    text: str
    entry: str
    args: tuple[str, ...]
    block: tuple[int, int, int]
    options: dict[str, int | bool | str]
    careful: bool = False


@dataclass(frozen=True, slots=True)
class Lowered:
    """A kernel as OpenCL C.

    Attributes:
        text: OpenCL C 1.2, with the ABI of ADR 22.
        entry: name of the kernel in `text`.
        parameters: the kernel's parameters, one per argument.
        places: the places in the source that the kernel can report, by number.
    """

    text: str
    entry: str
    parameters: tuple[Parameter, ...]
    places: tuple[str, ...] = ()


class CompiledLanguage(Protocol):
    """The interface of a language for the compiler. A module with these functions implements it."""

    def for_cpu(self, request: Request) -> Lowered:
        """Lower a kernel to OpenCL C that checks every access.

        Raises:
            ForeignError: names the operation that cannot be lowered, or the law that the text breaks.
        """
        ...

    def for_gpu(self, request: Request, target: str, build: Callable[[str], bytes]) -> ForeignCode:
        """Compile a kernel for a GPU, with a check of every access.

        Args:
            request: the kernel to compile.
            target: like ``cuda:sm_90`` or ``hip:gfx942``.
            build: compiles text in the target vendor's C (CUDA C or HIP C) for the target.

        Raises:
            ForeignError: the accesses of the text cannot be checked, or the text is not in this language.
            WisError: no compiler for the target is installed, or the compiler refuses the text.
        """
        ...


class ParameterKind(enum.Enum):
    """Kind of a kernel's parameter: a number, a buffer that the kernel only reads, or a buffer that the kernel may write."""

    NUMBER = "number"
    READ = "read"
    WRITTEN = "written"


class ReadLanguage(Protocol):
    """The interface of a language for clients. A module with this function implements it."""

    def parameters(self, text: str, entry: str, template: str) -> tuple[ParameterKind, ...]:
        """The kinds of a kernel's parameters.

        Args:
            text: the source.
            entry: name of the function.
            template: the function's template arguments as text; empty if there are none.

        Raises:
            WisError: the text cannot be parsed, or has no such kernel. The message names the line.
        """
        ...


def compiled(language: str) -> CompiledLanguage:
    """The module that compiles kernels in a language.

    Raises:
        MissingLanguageError: the language's distribution is not installed.
        ForeignError: the language is unknown.
    """
    cure = "in the environment of wooly-compiler, then restart the compiler and the executor"
    found: CompiledLanguage = _load(COMPILER, language, cure)
    return found


def read(language: str) -> ReadLanguage:
    """The module that reads kernels in a language, for a client.

    Raises:
        MissingLanguageError: the language's distribution is not installed.
        ForeignError: the language is unknown.
    """
    found: ReadLanguage = _load(CLIENT, language, "in the environment of this script")
    return found


def folders() -> tuple[Path, ...]:
    """The folders of the installed packages that compile languages, ordered by language name."""
    found: dict[str, Path] = {}
    for _, entry in sorted(installed(COMPILER).items()):
        package = entry.module.partition(".")[0]
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            found[package] = Path(spec.submodule_search_locations[0])
    return tuple(found.values())


@functools.cache
def installed(group: str) -> Mapping[str, EntryPoint]:
    """The installed entry points of a group, by language. A process searches once, because a search reads a file of each
    distribution (about 25 ms).
    """
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=group)}


def _load(group: str, language: str, cure: str) -> Any:
    if language not in DISTRIBUTIONS:
        raise ForeignError(f"language {language} is unknown; known languages: {', '.join(DISTRIBUTIONS)}")
    name, entry = DISTRIBUTIONS[language], installed(group).get(language)
    if entry is None:
        raise MissingLanguageError(
            f"kernels in {language} need {name}, which is not installed: pip install {name} {cure}"
        )
    try:
        return entry.load()
    except ImportError as e:
        raise MissingLanguageError(
            f"kernels in {language} need {name}, which is installed but cannot be imported: {e}"
        ) from e
