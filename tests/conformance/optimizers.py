"""Runs every optimizer of PyTorch's own optimizer database on the device and on the CPU.

Like `opinfo`, it prints one JSON line with counts by outcome per unit (optimizer, variant, dtype). Every configuration of the
database takes `STEPS` steps. Variants:

forloop, foreach, fused, differentiable   this implementation: losses, parameters and the optimizer's final state
capturable                                PyTorch reserves this option for devices: the CPU runs the same code for comparison
groups                                    two groups of parameters, one of them with its own step size
complex                                   complex parameters
scheduler                                 with each of the optimizer's schedulers
state                                     the state passes through state_dict, from the CPU and back, and through a file
errors                                    error cases of the database: the same exception
"""

import copy
import io
import sys

import torch
from comparison import compare, compare_errors, failure, program, quietly, to
from torch.testing._internal.common_optimizers import optim_db

STEPS = 5
VARIANTS = (
    "forloop",
    "foreach",
    "fused",
    "differentiable",
    "capturable",
    "groups",
    "complex",
    "scheduler",
    "state",
    "errors",
)
FLAGS = ("foreach", "fused", "differentiable")


def units():
    """(index, optimizer, variant, dtype) of all units."""
    found = []
    for info in optim_db:
        for dtype in ("float32", "float64"):
            for variant in VARIANTS:
                applies = {
                    "foreach": "foreach" in info.supported_impls,
                    "fused": "fused" in info.supported_impls and "cpu" in info.supports_fused_on,
                    "differentiable": "differentiable" in info.supported_impls,
                    "capturable": info.has_capturable_arg,
                    "groups": info.supports_param_groups,
                    "complex": info.supports_complex and dtype == "float32" and info.name != "Muon",
                    "errors": info.optim_error_inputs_func is not None and dtype == "float32",
                }.get(variant, True)
                if applies:
                    found.append((len(found), info, variant, dtype))
    return found


def let_capturable_run_anywhere():
    """Allow `capturable` on the CPU. PyTorch reserves it for devices, but its code runs on the CPU, too."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, "_get_capturable_supported_devices"):
            module._get_capturable_supported_devices = lambda *a, **k: ["cpu", "cuda", "wooly"]


def parameters(info, dtype):
    """Parameters on the CPU, the same every time."""
    torch.manual_seed(3)
    shapes = [(6, 4), (4, 4)] if info.name == "Muon" else [(6, 4), (6,), (), (2, 3, 2)]
    return [torch.randn(s, dtype=dtype) for s in shapes]


def adjusted(info, variant, kwargs):
    """Keyword arguments of a configuration for a variant; None if it does not apply."""
    kwargs = dict(kwargs)
    if variant in FLAGS:
        kwargs |= {flag: flag == variant for flag in FLAGS if flag in info.supported_impls}
    elif variant == "forloop":
        kwargs |= {flag: False for flag in FLAGS if flag in info.supported_impls}
    if variant == "capturable":
        kwargs["capturable"] = True
    elif kwargs.get("capturable"):
        return None
    return kwargs


def as_chosen_on_a_device(info, kwargs):
    """On a device PyTorch uses the foreach implementation by default. On the CPU it must be requested."""
    if info.name != "Adafactor" and "foreach" in info.supported_impls and not any(flag in kwargs for flag in FLAGS):
        return kwargs | {"foreach": True}
    return kwargs


def train(info, variant, kwargs, dtype, where, scheduler=None, switch=False):
    """Losses, parameters and state after some steps.

    With `switch`, the optimizer is recreated from its state after half of them.
    """
    source = torch.complex64 if variant == "complex" else dtype
    params = [to(p, where).requires_grad_() for p in parameters(info, source)]
    torch.manual_seed(4)
    targets = [to(torch.randn_like(p), where) for p in parameters(info, source)]
    kwargs = {k: to(v, where) if k != "lr" else v for k, v in kwargs.items()}
    if isinstance(kwargs.get("lr"), torch.Tensor) and (variant in ("capturable", "fused") or where == "cpu"):
        kwargs["lr"] = to(kwargs["lr"], where)
    if variant == "groups":
        half = len(params) // 2
        groups = [{"params": params[:half], "lr": 0.02}, {"params": params[half:]}]
    else:
        groups = params
    optimizer = info.optim_cls(groups, **kwargs)
    schedulers = [make(optimizer) for make in scheduler or ()]
    losses = []
    for n in range(STEPS):
        if switch and n == STEPS // 2:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer = info.optim_cls(params, **kwargs)
            optimizer.load_state_dict(torch.load(file, weights_only=False))

        def closure(optimizer=optimizer):
            optimizer.zero_grad()
            values = params
            if variant == "differentiable":
                values = [p.clone() for p in params]
            loss = sum(
                ((p - t).abs() ** 2 * (i + 1)).sum() for i, (p, t) in enumerate(zip(values, targets, strict=True))
            )
            loss.backward()
            if info.only_supports_sparse_grads:
                for p in params:
                    p.grad = p.grad.to_sparse()
            return loss

        if variant == "differentiable":
            losses.append(closure().detach())
            with torch.no_grad():
                optimizer.step()
        elif info.step_requires_closure:
            losses.append(optimizer.step(closure).detach())
        else:
            losses.append(closure().detach())
            optimizer.step()
        for s in schedulers:
            if isinstance(s, torch.optim.lr_scheduler.ReduceLROnPlateau):
                s.step(losses[-1])
            else:
                s.step()
    state = copy.deepcopy(optimizer.state_dict())
    return losses, [p.detach() for p in params], state["state"], [float(g["lr"]) for g in state["param_groups"]]


def check(info, variant, kwargs, dtype, device, scheduler=None):
    plain = as_chosen_on_a_device(info, kwargs)

    def run(where, given):
        return quietly(lambda: train(info, variant, given, dtype, where, scheduler, switch=variant == "state"))[0]

    try:
        expected = run("cpu", plain)
    except Exception as e:
        return compare_errors(lambda: run(device, kwargs), e)
    try:
        got = run(device, kwargs)
        for what, a, b in zip(("losses", "parameters", "state", "step sizes"), got, expected, strict=True):
            outcome, detail = compare(a, b, strides=False)
            if outcome != "pass":
                return outcome, f"{what}: {detail}"
        return "pass", ""
    except Exception as e:
        return failure(e)


def check_error(info, given, device):
    def attempt(where):
        kwargs = given.optimizer_error_input.kwargs
        return info.optim_cls(to(given.optimizer_error_input.params, where, True), **kwargs)

    try:
        attempt("cpu")
    except Exception as e:
        return compare_errors(lambda: attempt(device), e)
    return "skip", ""


def run_unit(report, unit, device, limit):
    index, info, variant, name = unit
    let_capturable_run_anywhere()
    dtype = getattr(torch, name)
    report.start(index, info.name, variant, name)
    if variant == "errors":
        for n, given in enumerate(info.optim_error_inputs_func("cpu", dtype)):
            report.add(*check_error(info, given, device), n)
        return report.finish()
    for n, given in enumerate(info.optim_inputs_func("cpu")[:limit]):
        kwargs = adjusted(info, variant, given.kwargs)
        if kwargs is None:
            continue
        if variant == "scheduler":
            schedulers = info.scheduler_inputs
            if limit is not None:  # one of the samples, a different one for every unit
                schedulers = [schedulers[index % len(schedulers)]]
            for makers in schedulers:
                makers = makers if isinstance(makers, (list, tuple)) else [makers]
                report.add(*check(info, variant, kwargs, dtype, device, makers), f"{n} ({given.desc})")
        else:
            report.add(*check(info, variant, kwargs, dtype, device), f"{n} ({given.desc})")
    return report.finish()


if __name__ == "__main__":
    program(units(), run_unit, lambda info: info.name)
