"""Compares the answers of "cuda" under Wooly with CUDA's answers.

Outcomes, and the columns of the table in which they count:

===========  ===========  =============================================================================================
same         same         the same bits; or the same exception
close        close        floating-point numbers within the dtype's tolerance
unsupported  unsupported  NotImplementedError, or no kernel for the dtype, where CUDA computes
values       different    numbers beyond the tolerance, other integers, other texts
kind         different    another dtype, shape or structure
raises       different    another exception where CUDA computes
refused      different    a result where CUDA raises
message      different    an exception where CUDA raises one, too, but of another type or topic
crash        different    a process died or hung
known        different    CUDA's answer is not the one that the section states
inputs       different    the sides had different inputs: a fault of the section
===========  ===========  =============================================================================================
"""

import math
from dataclasses import dataclass

import torch
from cases import COMPLAINTS, complaint
from comparison import wording

COLUMNS = {"same": "same", "close": "close", "unsupported": "unsupported"}
#: Relative and absolute tolerance. PyTorch's own comparison of whole operators on both devices allows 1e-3 for float32. Other
#: libraries sum in another order, and their exponential may differ by one or two units in the last place.
TOLERANCES = {
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
    torch.float32: (1e-3, 1e-3),
    torch.float64: (1e-6, 1e-6),
    torch.complex32: (1e-2, 1e-2),
    torch.complex64: (1e-3, 1e-3),
    torch.complex128: (1e-6, 1e-6),
}
#: Errors after which nothing can be compared: they end CUDA's context, and with it the program.
ASSERTED = "device-side assert"


@dataclass(frozen=True)
class Verdict:
    """The verdict on one case.

    Attributes:
        outcome: see above.
        detail: a text for the report.
        deviation: the largest difference between floating-point numbers, as a share of the tolerance.
    """

    outcome: str
    detail: str = ""
    deviation: float = 0.0


def judge(theirs, ours):
    """The verdict on two records of one case; None if they cannot be compared."""
    for side, record in (("CUDA", theirs), ("ours", ours)):
        if record is None:
            return Verdict("inputs", f"{side} does not have this case")
        if record.get("error", [""])[0] == "crash":
            return Verdict("crash", f"{side}: {record['error'][1]}")
    if "error" in theirs and ASSERTED in theirs["error"][1]:
        return None
    if "inputs" in theirs and "inputs" in ours and theirs["inputs"] != ours["inputs"]:
        return Verdict("inputs", "the sides' inputs differ")
    if "known" in theirs and (wrong := _judge(theirs["known"] | {"name": ""}, theirs)).outcome not in ("same", "close"):
        return Verdict("known", f"the section states another answer of CUDA: {wrong.detail}")
    return _judge(theirs, ours)


def _judge(theirs, ours):
    if "error" in theirs and "error" in ours:
        return _errors(theirs["error"], ours["error"], ours.get("exact_text", False))
    if "error" in ours:
        kind, text, not_implemented = ours["error"]
        unsupported = not_implemented or complaint(text) == next(iter(COMPLAINTS))
        return Verdict("unsupported" if unsupported else "raises", _line(kind, text))
    if "error" in theirs:
        return Verdict("refused", f"CUDA: {_line(*theirs['error'][:2])}")
    tolerances = {getattr(torch, k.removeprefix("torch.")): v for k, v in ours.get("tolerances", {}).items()}
    return _values(theirs["value"], ours["value"], tolerances, ours.get("kind_only", False), "")


def _line(kind, text):
    return " ".join(f"{kind}: {text}".split())[:200]


def _errors(theirs, ours, exact):
    a, b = wording(theirs[1]), wording(ours[1])
    if "CUDA error" in theirs[1]:  # the rest is advice on debugging kernels
        a, b = a.splitlines()[0], b.splitlines()[0]
    if theirs[0] == ours[0] and (a == b or (not exact and complaint(a) == complaint(b))):
        return Verdict("same")
    if ours[2] and theirs[2]:
        return Verdict("same")  # neither side has such a kernel
    if ours[2]:
        return Verdict("unsupported", f"{_line(*ours[:2])} / CUDA: {_line(*theirs[:2])}")
    return Verdict("message", f"{_line(*ours[:2])} / CUDA: {_line(*theirs[:2])}")


def _values(theirs, ours, tolerances, kind_only, path):
    """The worst verdict in two trees of the same structure."""
    if type(theirs) is not type(ours):
        return Verdict("kind", f"{path or 'result'} is a {type(ours).__name__}, CUDA's a {type(theirs).__name__}")
    if isinstance(theirs, dict):
        if theirs.keys() != ours.keys():
            return Verdict("kind", f"{path or 'result'} has {sorted(ours)}, CUDA's {sorted(theirs)}"[:200])
        pairs = [(f"{path}.{k}".lstrip("."), theirs[k], ours[k]) for k in theirs]
    elif isinstance(theirs, list):
        if len(theirs) != len(ours):
            return Verdict("kind", f"{path or 'result'} has {len(ours)} parts, CUDA's {len(theirs)}")
        pairs = [(f"{path}.{k}".lstrip("."), a, b) for k, (a, b) in enumerate(zip(theirs, ours, strict=True))]
    else:
        return _leaf(theirs, ours, tolerances, kind_only, path)
    found = [_values(a, b, tolerances, kind_only, where) for where, a, b in pairs] or [Verdict("same")]
    deviation = max(v.deviation for v in found)
    worst = next((v for v in found if v.outcome not in COLUMNS), None) or next(
        (v for v in found if v.outcome == "close"), found[0]
    )
    return Verdict(worst.outcome, worst.detail, deviation)


def _leaf(theirs, ours, tolerances, kind_only, path):
    at = f"{path}: " if path else ""
    if isinstance(theirs, torch.Tensor):
        if theirs.dtype != ours.dtype or theirs.shape != ours.shape:
            mine, other = (f"{t.dtype}{tuple(t.shape)}" for t in (ours, theirs))
            return Verdict("kind", f"{at}{mine}, CUDA's {other}")
        if kind_only:
            return Verdict("same")
        return _tensors(theirs, ours, tolerances, at)
    if isinstance(theirs, float) and not kind_only:
        return _tensors(torch.tensor(theirs), torch.tensor(ours), tolerances, at)
    if theirs == ours or kind_only:
        return Verdict("same")
    return Verdict("values", f"{at}{ours!r}, CUDA's {theirs!r}"[:300])


def _tensors(theirs, ours, tolerances, at):
    if not (theirs.is_floating_point() or theirs.is_complex()):
        different = int((theirs != ours).sum())
        if not different:
            return Verdict("same")
        return Verdict("values", f"{at}{different} of {theirs.numel()} elements of {theirs.dtype} differ")
    relative, absolute = tolerances.get(theirs.dtype) or TOLERANCES.get(theirs.dtype, (0.0, 0.0))
    if theirs.is_complex():
        theirs, ours = (torch.view_as_real(t.to(torch.complex128)) for t in (theirs, ours))
    a, b = theirs.to(torch.float64), ours.to(torch.float64)
    if torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()):
        return Verdict("same")
    finite = a.isfinite() & b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()) or not torch.equal(a.isnan(), b.isnan()):
        return Verdict("values", f"{at}infinities or NaNs in other positions", math.inf)
    difference = (a[finite] - b[finite]).abs()
    share = difference / (absolute + relative * a[finite].abs()).clamp_min(1e-300)
    deviation = share.max().item()
    detail = f"{at}differs by up to {difference.max().item():.3g}, {deviation:.2g} of the tolerance"
    return Verdict("close" if deviation <= 1 else "values", detail, deviation)
