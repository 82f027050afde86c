"""torchao: weights of 8 bits, and an optimizer with states of four bits."""

import torch
from torch import nn
from torchao.optim import AdamW4bit
from torchao.quantization import Float8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, quantize_


def run(device):
    results = {}
    x = torch.arange(4 * 128.0).reshape(4, 128).sin().bfloat16().to(device)
    for config in (Int8DynamicActivationInt8WeightConfig(), Float8WeightOnlyConfig()):
        model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64)).bfloat16().to(device)
        quantize_(model, config)
        with torch.no_grad():
            results[type(config).__name__] = model(x)
    model, x = nn.Linear(256, 256).to(device), torch.arange(8 * 256.0).reshape(8, 256).sin().to(device)
    optimizer, losses = AdamW4bit(model.parameters(), lr=1e-3), []
    for _ in range(3):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return results | {"losses": losses}
