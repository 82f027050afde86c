"""Opacus: per-sample gradients with clipping; noise of zero, so that results are the same everywhere."""

import warnings

import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset


def run(device):
    warnings.filterwarnings("ignore", module="opacus")
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.GroupNorm(2, 4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 3)
    ).to(device)
    x = torch.arange(32 * 64.0).reshape(32, 1, 8, 8).sin()
    loader = DataLoader(TensorDataset(x, torch.arange(32) % 3), batch_size=8)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), data_loader=loader,
        noise_multiplier=0.0, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    losses = []
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, "weight": model._module[4].weight}
