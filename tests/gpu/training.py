"""Modules and optimizers of PyTorch's databases, and whole networks, over several steps: losses, gradients, parameters, state."""

import copy
import functools

import modules as module_cases
import optimizers as optimizer_cases
import torch
from cases import Case
from comparison import to
from modules import module_db
from optimizers import optim_db
from torch import nn
from torch.nn import functional as F

STEPS = 6
_MODULE_DTYPES = ("float32", "float16", "bfloat16")
_VARIANTS = ("forloop", "foreach", "fused", "capturable", "scheduler", "state")
_LOOSER = {torch.float32: (1e-2, 1e-3)}


def cases(selection):
    yield from _modules(selection)
    yield from _optimizers(selection)
    for name, make in NETWORKS.items():
        for kind in ("float32", "autocast float16", "autocast bfloat16"):
            group = f"network {name}"
            if selection.takes(group):
                low = torch.float32 if kind == "float32" else getattr(torch, kind.split()[1])
                share = 2e-2 if low is torch.float32 else 0.1
                yield Case(
                    f"{group}/{kind}",
                    functools.partial(train, make, low),
                    tolerances={torch.float32: (share, share), torch.float64: (share, share)},
                )


def _modules(selection):
    for info in module_db:
        group = f"module {info.name}"
        if not selection.takes(group):
            continue
        for name in _MODULE_DTYPES:
            dtype = getattr(torch, name)
            for training in (True, False):
                for n, given in enumerate(module_cases.inputs_of(info, dtype, training)[: selection.samples]):
                    if given.forward_input is None or info.is_lazy:
                        continue
                    m = module_cases.make(info, given, dtype, training)
                    arguments = (given.forward_input.args, given.forward_input.kwargs)

                    def run(device, m=m, arguments=arguments):
                        there = copy.deepcopy(m).to(device)
                        results, gradients, state = module_cases.step(there, to(arguments, device, True))
                        return {"results": results, "gradients": gradients, "state": state}

                    yield Case(
                        f"{group}/{name}/{'train' if training else 'eval'}/{n}",
                        run,
                        inputs=(arguments, dict(m.state_dict())),
                        tolerances=_LOOSER,
                        kind_only=module_cases.is_random(m),
                    )


def _optimizers(selection):
    for info in optim_db:
        group = f"optimizer {info.name}"
        if not selection.takes(group):
            continue
        for variant in _VARIANTS:
            if (
                (variant in ("foreach", "fused") and variant not in info.supported_impls)
                or (variant == "fused" and "cuda" not in info.supports_fused_on)
                or (variant == "capturable" and not info.has_capturable_arg)
            ):
                continue
            for n, given in enumerate(info.optim_inputs_func("cpu")[: selection.samples + 2]):
                kwargs = optimizer_cases.adjusted(info, variant, given.kwargs)
                if kwargs is None:
                    continue
                schedules = [None]
                if variant == "scheduler":
                    if n:
                        break
                    schedules = [m if isinstance(m, (list, tuple)) else [m] for m in info.scheduler_inputs]
                for k, schedule in enumerate(schedules):

                    def run(device, info=info, variant=variant, kwargs=kwargs, schedule=schedule):
                        if device == "cpu":
                            optimizer_cases.let_capturable_run_anywhere()
                            kwargs = optimizer_cases.as_chosen_on_a_device(info, kwargs)
                        names = ("losses", "parameters", "state", "step sizes")
                        found = optimizer_cases.train(
                            info, variant, kwargs, torch.float32, device, schedule, variant == "state"
                        )
                        return dict(zip(names, found, strict=True))

                    yield Case(f"{group}/{variant}/{n}{f'.{k}' if schedule else ''}", run, tolerances=_LOOSER)


class Attends(nn.Module):
    """An embedding, an encoder layer, a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.layer(self.embed((x.abs() * 7).long() % 17)).mean(1))


class Recurs(nn.Module):
    """Two LSTM layers and a head."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.lstm(x.unflatten(1, (4, 4)))[0][:, -1])


def _mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5))


def _convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip


NETWORKS = {"mlp": _mlp, "convolutions": _convolutions, "attention": Attends, "lstm": Recurs}


def train(make, low, device):
    """Losses of some AdamW steps with clipped gradients; with mixed precision and scaling if `low` is not float32."""
    torch.manual_seed(0)
    model = make().to(device)
    x, y = torch.randn(32, 16).to(device), torch.randint(0, 5, (32,)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, enabled=low is torch.float16)
    losses, norms = [], []
    for _ in range(STEPS):
        with torch.autocast(device, low, enabled=low is not torch.float32):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "scale": scaler.get_scale(), "dtype": str(loss.dtype)}
