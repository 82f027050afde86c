"""Trains a small convolutional network on generated digits and prints its losses as JSON. Ordinary PyTorch."""

import argparse
import json
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def made(count):
    """Noisy images of ten shapes of 8×8, and the shape of each."""
    shapes = (torch.rand(10, 1, 8, 8) > 0.5).float()
    labels = torch.arange(count) % 10
    return shapes[labels] + torch.randn(count, 1, 8, 8) * 0.3, labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    images, labels = made(512)
    loader = DataLoader(TensorDataset(images[:448], labels[:448]), batch_size=64, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    ).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    losses = []
    for _ in range(args.epochs):
        for x, y in loader:
            x, y = x.to(args.device, non_blocking=True), y.to(args.device, non_blocking=True)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        found = model(images[448:].to(args.device)).argmax(1)
        right = (found == labels[448:].to(args.device)).float().mean().item()
    print(json.dumps({"losses": losses, "right": right}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
