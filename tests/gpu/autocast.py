"""Mixed precision: result dtypes of every operator in CUDA's cast lists, and of some others, under float16 and bfloat16."""

import contextlib
import itertools
import runpy
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
from cases import Case
from torch._subclasses.fake_tensor import FakeTensorMode

_FILE = Path(__file__).parents[2] / "services" / "intercept" / "tests" / "autocast_cases.py"
lists = SimpleNamespace(**runpy.run_path(str(_FILE)))


def cases(selection):
    for name, (lower, pair) in itertools.product(lists.CALLS, itertools.product(lists.LOWER, lists.PAIRS)):
        if not selection.takes(name):
            continue
        types = " ".join(str(t).removeprefix("torch.") for t in (*pair, lower))
        asked = lists.LIKE.get(name, name) if selection.from_fakes else name
        yield Case(
            f"{name}/{types}",
            lambda device, asked=asked, pair=pair, lower=lower: dtypes(
                asked, pair, lower, device, selection.from_fakes
            ),
        )


@contextlib.contextmanager
def casting(lower, fake):
    """`torch.autocast`; without a GPU, its effect on a machine with a GPU."""
    if not fake:
        with torch.autocast("cuda", lower):
            yield
        return
    torch.set_autocast_dtype("cuda", lower)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


def dtypes(name, pair, lower, device, fake):
    """The dtypes of the call's results, or the refusal.

    CPU builds contain CUDA's casts, too. Without a GPU, fake tensors show them.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if fake:
            stack.enter_context(FakeTensorMode())
        names = lists.operands(*pair, "cuda" if fake else device)
        try:
            with casting(lower, fake):
                result = eval(lists.CALLS[name], names)  # noqa: S307  # calls that stand in autocast_cases.py
                results = result if isinstance(result, (tuple, list)) else [result]
        except NotImplementedError as e:
            if not fake and "not supported on the wooly" in str(e):
                raise
            return "refused"
        except (RuntimeError, ValueError, AssertionError):
            return "refused"
    return [t.dtype for t in results]
