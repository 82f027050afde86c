"""Languages of kernels as optional distributions: what a distribution offers for a language, and how it is found.

A distribution names one module per language as an entry point. The entry point has the name of the language
(`wooly_wis.foreign.LANGUAGES`):

    [project.entry-points."wooly.compiler.languages"]    the module has the functions of `CompiledLanguage`
    [project.entry-points."wooly.client.languages"]      the module has the functions of `ReadLanguage`

The module is in a package, whose sources are part of the compiler's version. It is imported when a kernel in its language is
first asked for. ADR 22 has the contract of the kernels themselves.
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

#: The groups of entry points: what compiles a language, and what reads it in clients.
COMPILER: Final = "wooly.compiler.languages"
CLIENT: Final = "wooly.client.languages"
#: The distribution that offers a language, for the error where the language is not installed.
DISTRIBUTIONS: Final[Mapping[str, str]] = {"cuda-c": "wooly-cuda-c", "ttir": "wooly-triton"}


class ForeignError(WisError):
    """A kernel in another language cannot be compiled; the message names the place in its text."""

    code = "wis.foreign"


class MissingLanguageError(ForeignError):
    """The distribution that offers a language is not installed. After its installation the same request may succeed."""

    code = "wis.language_missing"
    retryable = True


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be compiled.

    Attributes:
        text: the source.
        entry: the function.
        args: per argument: ``*f32`` for a buffer of such elements, else a scalar's dtype.
        block: threads of a group.
        options: hints and needs.
    """

    text: str
    entry: str
    args: tuple[str, ...]
    block: tuple[int, int, int]
    options: dict[str, int | bool | str]


@dataclass(frozen=True, slots=True)
class Lowered:
    """A kernel as OpenCL C.

    Attributes:
        text: OpenCL C 1.2, with the ABI of ADR 22.
        entry: the kernel in it.
        parameters: of the kernel, one per argument.
        places: what complaints are about, by number.
    """

    text: str
    entry: str
    parameters: tuple[Parameter, ...]
    places: tuple[str, ...] = ()


class CompiledLanguage(Protocol):
    """What the compiler needs of a language. A module with these functions is one."""

    def for_cpu(self, request: Request) -> Lowered:
        """A kernel as OpenCL C in which every access is checked.

        Raises:
            ForeignError: names the operation that has no lowering, or the law that the text breaks.
        """
        ...

    def for_gpu(self, request: Request, target: str, build: Callable[[str], bytes]) -> ForeignCode:
        """A kernel's code for a GPU, in which every access is checked.

        Args:
            request: what is to be compiled.
            target: like ``cuda:sm_90`` or ``hip:gfx942``.
            build: compiles a text in the C of the target's vendor for the target.

        Raises:
            ForeignError: the text cannot be checked, or is not in this language.
            WisError: no compiler for the target is installed, or it refuses the text.
        """
        ...


class Passed(enum.Enum):
    """What a parameter of a kernel is: a number, a buffer that is only read, a buffer that may be written."""

    NUMBER = "number"
    READ = "read"
    WRITTEN = "written"


class ReadLanguage(Protocol):
    """What a client needs of a language. A module with this function is one."""

    def parameters(self, text: str, entry: str, template: str) -> tuple[Passed, ...]:
        """What the parameters of a kernel are.

        Args:
            text: the source.
            entry: the function.
            template: its template arguments as they are written; empty without any.

        Raises:
            WisError: the text is not understood, or has no such kernel; the message names the line.
        """
        ...


def compiled(language: str) -> CompiledLanguage:
    """The module that compiles kernels in a language.

    Raises:
        MissingLanguageError: its distribution is not installed.
        ForeignError: there is no such language.
    """
    cure = "where kernels are compiled (beside wooly-compiler), and start the compiler and the executor anew"
    found: CompiledLanguage = _load(COMPILER, language, cure)
    return found


def read(language: str) -> ReadLanguage:
    """The module that reads kernels in a language, for a client.

    Raises:
        MissingLanguageError: its distribution is not installed.
        ForeignError: there is no such language.
    """
    found: ReadLanguage = _load(CLIENT, language, "where this script runs (beside wooly)")
    return found


def folders() -> tuple[Path, ...]:
    """The folders of the packages that compile languages here, in the order of the languages' names."""
    found: dict[str, Path] = {}
    for _, entry in sorted(installed(COMPILER).items()):
        package = entry.module.partition(".")[0]
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            found[package] = Path(spec.submodule_search_locations[0])
    return tuple(found.values())


@functools.cache
def installed(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by language. A process searches once, which takes about 25 ms: a file of each distribution."""
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=group)}


def _load(group: str, language: str, cure: str) -> Any:
    if language not in DISTRIBUTIONS:
        raise ForeignError(f"there is no language {language}; there are {', '.join(DISTRIBUTIONS)}")
    name, entry = DISTRIBUTIONS[language], installed(group).get(language)
    if entry is None:
        raise MissingLanguageError(
            f"kernels in {language} need {name}, which is not installed: pip install {name} {cure}"
        )
    try:
        return entry.load()
    except ImportError as e:
        raise MissingLanguageError(f"kernels in {language} need {name}, which cannot be loaded: {e}") from e
