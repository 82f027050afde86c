"""The extension libraries that this executor offers: operators that other libraries than PyTorch register with PyTorch.

A process loads its libraries once, at its start. PyTorch keeps registered operators per process, and so does this file.

Operators are *checked* if they have laws (`guards.vision`): each session may call them. The other operators are native code that
Wooly cannot check, so only sessions with the permission `opaque_kernels` may call them.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from wooly_wis.externs import is_extension
from wooly_wis.program import Form

from wooly_executor.errors import ExecutorError
from wooly_executor.runtime.torch_private import OpOverload, all_operator_names, has_kernel, schema_of

log = logging.getLogger("wooly.executor")
#: Libraries that an executor offers without a setting, if they are installed. All their offered operators have laws.
DEFAULT = ("torchvision",)
#: Namespaces that are never offered: torchvision's readers and writers of files on the executor's machine.
NEVER = frozenset({"image", "video_reader", "decoder", "torchcodec_ns"})
#: Types of arguments that a program cannot pass.
_NOT_PASSED = ("Storage", "Stream", "Dimname", "__torch__", "Generator", "QScheme", "Dict", "Any", "t", "Future")


class ExtensionLibraryError(ExecutorError):
    """A library of the setting `WOOLY_EXECUTOR_LIBRARIES` cannot be imported."""

    code = "executor.extension_library"


@dataclass(frozen=True, slots=True)
class ExtensionLibrary:
    """A library with extension operators.

    Attributes:
        name: its import name.
        version: its version.
        operators: the offered operators by name, such as ``torchvision.nms.default``.
        checked: names of the operators that have laws.
        stateless: the executor's operator says that all its operators keep nothing between calls.
    """

    name: str
    version: str
    operators: Mapping[str, OpOverload]
    checked: frozenset[str]
    stateless: bool = False

    def facts(self, *, opaque: bool) -> dict[str, Any]:
        """Return what a client needs: version, digests of the schemas of the operators, operators that need a permission, and
        operators that may keep values outside of buffers.

        Args:
            opaque: the client's session has the permission `opaque_kernels`.
        """
        unchecked = sorted(self.operators.keys() - self.checked)
        digests = {n: schema_digest(op) for n, op in sorted(self.operators.items())}
        return {
            "version": self.version,
            "operators": digests,
            "withheld": [] if opaque else unchecked,
            "stateful": [] if self.stateless else unchecked,
        }


_libraries: dict[str, ExtensionLibrary] = {}
_offered: dict[str, OpOverload] = {}
_unchecked: set[str] = set()


def load(
    names: Iterable[str] | None, *, device_key: str, laws: frozenset[str], stateless: frozenset[str] = frozenset()
) -> None:
    """Import libraries and offer their operators.

    Args:
        names: import names; None: those of `DEFAULT` that are installed and work here.
        device_key: PyTorch's dispatch key of the device: ``CPU`` or ``CUDA``.
        laws: operators with laws, such as ``torchvision.nms``. Of a namespace with laws, no other operator is offered.
        stateless: libraries whose operators keep nothing between calls.

    Raises:
        ExtensionLibraryError: a named library cannot be imported.
    """
    wanted = DEFAULT if names is None else tuple(names)
    if unknown := sorted(stateless - set(wanted)):
        log.warning(
            "WOOLY_EXECUTOR_STATELESS_LIBRARIES names %s, but WOOLY_EXECUTOR_LIBRARIES does not", ", ".join(unknown)
        )
    for name in wanted:
        if names is None and importlib.util.find_spec(name) is None:
            continue
        before = _namespaces()
        try:
            module = importlib.import_module(name)
        except Exception as e:  # a library may fail in any way, for example because it was built for another torch
            if names is None:
                log.warning(
                    "the operators of %s are not offered: importing it failed: %s: %s", name, type(e).__name__, e
                )
                continue
            raise ExtensionLibraryError(
                f"cannot import {name} ({type(e).__name__}: {e}); install a build of it for torch {torch.__version__}, or "
                "remove it from WOOLY_EXECUTOR_LIBRARIES"
            ) from e
        spaces = ((_namespaces() - before) | {name}) - NEVER
        library = replace(_survey(name, _version(name, module), spaces, device_key, laws), stateless=name in stateless)
        _libraries[name] = library
        _offered.update(library.operators)
        _unchecked.update(library.operators.keys() - library.checked)
        log.info("%s %s: %d operators are offered", name, library.version, len(library.operators))


def offered(name: str) -> OpOverload | None:
    """Return an extension operator that this executor offers, or None."""
    return _offered.get(name)


def facts(*, opaque: bool) -> dict[str, Any]:
    """Return the facts of all libraries, by import name: see `ExtensionLibrary.facts`."""
    return {name: library.facts(opaque=opaque) for name, library in _libraries.items()}


def versions() -> dict[str, str]:
    """Return the version of each offered library, by import name."""
    return {name: library.version for name, library in _libraries.items()}


def unchecked_operators(forms: Iterable[Form]) -> frozenset[str]:
    """Return the operators in these forms that need the permission `opaque_kernels`."""
    if not _unchecked:
        return frozenset()
    names = {str(form.attr("name")) for form in forms if form.opcode == "extern"}
    return frozenset(names & _unchecked)


def schema_digest(op: OpOverload) -> str:
    """Return a short digest of an operator's schema. A client compares it with the digest of its own operator."""
    return hashlib.sha256(str(schema_of(op)).encode()).hexdigest()[:16]


def _namespaces() -> set[str]:
    return {name.partition("::")[0] for name in all_operator_names()}


def _version(name: str, module: Any) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", "unknown"))


def _survey(name: str, version: str, spaces: set[str], device_key: str, laws: frozenset[str]) -> ExtensionLibrary:
    operators: dict[str, OpOverload] = {}
    with_laws = {law.partition(".")[0] for law in laws}
    for qualified in sorted(all_operator_names()):
        space, _, rest = qualified.partition("::")
        bare, _, overload = rest.partition(".")
        full = f"{space}.{bare}.{overload or 'default'}"
        if space not in spaces or not is_extension(full):
            continue
        if space in with_laws and f"{space}.{bare}" not in laws:
            continue
        op = getattr(getattr(getattr(torch.ops, space), bare), overload or "default")
        if _can_be_called(op, device_key):
            operators[full] = op
    checked = frozenset(n for n in operators if n.rpartition(".")[0] in laws)
    return ExtensionLibrary(name, version, operators, checked)


def _can_be_called(op: OpOverload, device_key: str) -> bool:
    """Whether a program can call an operator: it has a kernel for the device, takes tensors, and returns no view."""
    schema = schema_of(op)
    if not any(has_kernel(op.name(), key) for key in (device_key, "CompositeExplicitAutograd")):
        return False
    types = [str(a.real_type) for a in schema.arguments]
    if not any("Tensor" in t for t in types):
        return False
    if any(t == bad or (len(bad) > 1 and bad in t) for t in types for bad in _NOT_PASSED):
        return False
    return schema.is_mutable or all(r.alias_info is None for r in schema.returns)
