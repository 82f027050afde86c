"""What PyTorch's tests need besides the installed PyTorch.

Nothing here changes what a test asserts, with one exception: tests of lists of tensors do not look for the names of CUDA's
kernels in a profile (`_UNCLAIMED`). They compare the numbers only, as they do for devices without a profiler.
"""

import ast
import contextlib
import importlib


@contextlib.contextmanager
def _side_streams():
    """A stream other than the default one on every device, by public names: PyTorch's own class uses names of its CUDA build."""
    import torch

    with contextlib.ExitStack() as stack:
        current = torch.cuda.current_device()
        for index in range(torch.cuda.device_count()):
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device=index)))
        torch.cuda.set_device(current)
        yield


def install():
    """Let device tests run on side streams, as on CUDA, and go on after a test whose operations failed late."""
    from torch.testing._internal import common_utils

    common_utils.CudaNonDefaultStream = _side_streams
    common_utils.TestCase._should_stop_test_suite = lambda test: False


def configure():
    """Set what PyTorch's `run_tests` sets from the command line: tests of TorchScript need the mode of its executor."""
    from torch.testing._internal import common_utils

    if hasattr(common_utils, "parse_cmd_line_args"):  # older releases do this when they are imported
        common_utils.parse_cmd_line_args()


def _has_tf32():
    """Whether the device has TF32, which CUDA devices have from capability 8 on."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def _skip_ops(test_case, test, to_skip):
    """`skipOps` as it was: newer releases read the names of the test and of its class from the function."""
    from torch.testing._internal.common_device_type import skipOps

    return skipOps(to_skip)


#: Older names of PyTorch's test library: module and name, and what the name stands for in the installed PyTorch.
_OLDER = {
    ("common_cuda", "tf32_is_not_fp32"): lambda module: _has_tf32,
    ("common_methods_invocations", "binary_ufuncs_and_refs"): lambda module: _with_references(module, "binary_ufuncs"),
    ("common_methods_invocations", "skip"): lambda module: _in("common_device_type").skip,
    ("common_methods_invocations", "skipOps"): lambda module: _skip_ops,
    ("common_methods_invocations", "xfail"): lambda module: _in("common_device_type").xfail,
    ("common_mkldnn", "bf32_on_and_off"): lambda module: module.reduced_f32_on_and_off,
    ("common_nn", "new_module_tests"): lambda module: module.get_new_module_tests(),
    ("common_utils", "dtype_abbrs"): lambda module: importlib.import_module("torch.utils._dtype_abbrs").dtype_abbrs,
}

#: Imports of names that newer releases do not have, and what stands in their place. Tests that use them fail on both sides.
_GONE = {
    "import create_nested_block_mask, flex_attention": "import flex_attention; create_nested_block_mask = None",
    "from torch._custom_op.functional import register_functional_op": "register_functional_op = None",
    "from torch.autograd._functions.utils import check_onnx_broadcast": "check_onnx_broadcast = None",
}


#: Assertions that only CUDA's own kernels can meet, and what stands in their place.
_UNCLAIMED = {"and torch.autograd.kineto_available()\n": "and False\n"}


def _in(owner):
    """A module of PyTorch's test library."""
    return importlib.import_module(f"torch.testing._internal.{owner}")


def rename(source):
    """Give PyTorch's test library its older names, as far as a test file imports them.

    The tests are those of PyTorch 2.6. Where the installed PyTorch has renamed them, whole files do not load, on either side.

    Args:
        source: the text of the test file.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("torch.testing._internal."):
            continue
        owner = node.module.rpartition(".")[2]
        for name in [alias.name for alias in node.names if (owner, alias.name) in _OLDER]:
            module = _in(owner)
            if not hasattr(module, name):
                setattr(module, name, _OLDER[owner, name](module))


def current(source):
    """The text of a test file in the form that the installed PyTorch's test library expects; no line moves.

    Device tests inherit from their generic class since PyTorch 2.7. Before, its methods were copied, and called their parent's
    by `self.__class__`, which now is a call of themselves without end.
    """
    for old, new in (_GONE | _UNCLAIMED).items():
        source = source.replace(old, new)
    return source.replace("super(self.__class__, self)", "super()")


def _with_references(invocations, group):
    """The operators of a group of the test library and their references in Python, each once: some releases' groups have both."""
    operators = getattr(invocations, group)
    names = {op.name for op in operators}
    references = [op for op in invocations.python_ref_db if getattr(op, "torch_opinfo_name", "") in names]
    return list({(op.name, op.variant_test_name): op for op in [*operators, *references]}.values())
