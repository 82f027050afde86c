"""Private names of PyTorch and CPython are used in one file per distribution, so that a new release needs checks only there.

A private name begins with one underscore. It is foreign if it is imported from PyTorch or the standard library, or if no source
of the distribution defines an attribute of this name.
"""

import ast
import json
import sys
from pathlib import Path

import pytest

from tests.torch_names import RECORD, SOURCES, private_names, unguarded

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = sorted(p.parent for p in ROOT.glob("*/*/src"))
#: The file for PyTorch's private names, and the file for CPython's.
FILES = ("torch_private.py", "python_private.py")
#: Folders that may use Triton's private names, because Triton has no public names for the same purpose.
TRITON = ("services/intercept/src/wooly/triton_capture", "libs/triton/src/wooly_triton")
#: Documented names with an underscore: of named tuples, of SQLAlchemy's rows, of os.
DOCUMENTED = {"_asdict", "_fields", "_make", "_mapping", "_replace", "_exit"}
#: Inherited attributes of other libraries than PyTorch and CPython, by the file that reads them.
INHERITED = {
    "libs/bus/src/wooly_bus/app.py": {"self._connection_kwargs"},  # FastStream's broker
    "libs/bus/src/wooly_bus/nats_client.py": {"self._current_server", "self._transport"},  # nats-py's client
    "integrations/vllm/src/wooly_vllm/block_tables.py": {"self._slot_mapping_enabled"},  # vLLM's block tables
    "integrations/vllm/src/wooly_vllm/transfers.py": {  # vLLM's staged writes, and its buffer
        *("self._staged_write_indices", "self._staged_write_starts", "self._staged_write_contents"),
        *("self._staged_write_cu_lens", "self._uva"),
    },
    "integrations/vllm/src/wooly_vllm/kernels.py": {"linear._POSSIBLE_FP8_BLOCK_KERNELS"},  # vLLM's table
    "integrations/vllm/src/wooly_vllm/adapters.py": {"self._update_base_metadata"},  # vLLM's adapters
    "integrations/vllm/src/wooly_vllm/expert_adapters.py": {"self._lora_context"},
    "integrations/vllm/src/wooly_vllm/states.py": {  # vLLM's states of models
        *("self._align_mode", "self._mamba_ctx", "mamba_utils._get_mamba_spec_for_layer"),
    },
}
#: Objects whose attributes are operators; many operator names begin with an underscore.
OPERATORS = {"aten", "mkldnn", "prims", "ops"}
PACKAGES = {"torch"} | sys.stdlib_module_names


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


#: The kinds of nodes that define a name or use one.
KINDS = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.Name, ast.Attribute),
    *(ast.Import, ast.ImportFrom),
)


def nodes_of(source):
    """The nodes of a source that define a name or use one."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, KINDS)]


def defined(sources):
    """All names that the nodes of the sources define: functions, classes, variables, attributes, slots."""
    found = set()
    for nodes in sources:
        for node in nodes:
            if isinstance(node, (ast.Name, ast.Attribute)):
                if isinstance(node.ctx, ast.Store):
                    found.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            else:
                match node:
                    case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=slots)):
                        found.update(s.value for s in slots)
    return found


def parts_of(node):
    """The names in a chain of attributes, first name first. A leading expression counts as an empty name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(parts)]


def foreign(nodes, own):
    """Line and name of each foreign private name in the nodes of a source."""
    packages = set()
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
            packages.update((a.asname or a.name).split(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{a.name}" for a in node.names]
        for name in names:
            if name.split(".")[0] in PACKAGES and any(map(is_private, name.split("."))):
                yield node.lineno, name
    packages &= PACKAGES
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in DOCUMENTED:
            *base, name = parts_of(node)
            if base[-1] not in OPERATORS and not OPERATORS & set(base[1:]) and (name not in own or base[0] in packages):
                yield node.lineno, ".".join([*base, name])


def sources(distribution):
    return {p: nodes_of(p.read_text()) for p in sorted(distribution.glob("src/**/*.py"))}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda p: p.name)
def test_foreign_private_names_are_in_one_file(distribution):
    read = sources(distribution)
    own = defined(read.values())
    found = []
    for path, nodes in read.items():
        where = path.relative_to(ROOT).as_posix()
        if path.name not in FILES and not where.startswith(TRITON):
            inherited = INHERITED.get(where, set())
            found += [f"{where}:{line}: {name}" for line, name in foreign(nodes, own) if name not in inherited]
    assert not found, f"move these to {' or '.join(FILES)} of the distribution:\n" + "\n".join(found)


@pytest.mark.parametrize("name", FILES)
def test_private_names_have_one_file_per_distribution(name):
    for distribution in DISTRIBUTIONS:
        assert len(list(distribution.glob(f"src/**/{name}"))) <= 1, distribution


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch._C.x", ["torch._C"]),
        ("from torch import _C", ["torch._C"]),
        ("from torch._C import _nn", ["torch._C._nn"]),
        ("import torch.utils._pytree", ["torch.utils._pytree"]),
        ("def f():\n    import sys\n    return sys._getframe()", ["sys._getframe"]),
        (
            "import torch\ndef f(op):\n    return op._schema, torch.nn.Module._apply",
            ["op._schema", "torch.nn.Module._apply"],
        ),
        ("def f(a):\n    return a.b()._schema", ["._schema"]),
        ("class A:\n    def f(self):\n        return self._cdata", ["self._cdata"]),
        ("import torch\n_C = torch._C", ["torch._C"]),
        ("class A:\n    def f(self, other):\n        self._own = other._own", []),
        ("import os\nimport torch\ntorch.ops.aten._foreach_add\nrow._mapping\nos._exit(0)\nx.__class__", []),
    ],
)
def test_foreign_private_names_are_found(source, expected):
    nodes = nodes_of(source)
    assert [name for _, name in foreign(nodes, defined([nodes]))] == expected


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.parent.name)
def test_private_names_that_a_release_of_pytorch_lacks_are_asked_for_first(source):
    """One of these names would end every script with an AttributeError, with that release only."""
    record, tree = json.loads(RECORD.read_text()), ast.parse(source.read_text())
    new = set(private_names(tree)) - {*record["everywhere"], *record["some"]}
    assert not new, f"look up which releases have {sorted(new)}: python tests/torch_names.py"
    lacking = {name: record["some"][name] for name in unguarded(tree, record["some"])}
    assert not lacking, (
        f"only these releases have them: {lacking}; ask with hasattr, or for a name that exactly these have"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f():\n    return a._new", {"_new"}),
        ("def f():\n    if hasattr(a, '_new'):\n        return a._new", set()),
        ("def f():\n    return getattr(a, '_new', None)", set()),
        ("def f():\n    if hasattr(a, '_newest'):\n        return a._new", set()),
        ("def f():\n    if hasattr(a, '_new'):\n        return a._newest", {"_newest"}),
        ("def f():\n    if hasattr(a, '_old'):\n        return a._new", {"_new"}),
        ("def f():\n    return hasattr(a, '_new')\ndef g():\n    return a._new", {"_new"}),
        ("def f(self):\n    return self._new, a._old", set()),
        ("from a import _new", {"_new"}),
    ],
)
def test_names_without_a_guard_are_found(source, expected):
    assert unguarded(ast.parse(source), {"_new": ["2.14", "2.15"], "_newest": ["2.15"]}) == expected
