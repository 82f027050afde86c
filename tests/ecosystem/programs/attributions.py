"""Captum: integrated gradients, occlusion, layer attributions and feature ablation of a small network."""

import torch
from captum.attr import FeatureAblation, IntegratedGradients, LayerGradCam, Occlusion, Saliency


def run(device):
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(),
        torch.nn.Linear(128, 5),
    ).to(device).eval()  # fmt: skip
    x = torch.arange(2 * 3 * 64.0).reshape(2, 3, 8, 8).sin().to(device)
    return {
        "gradients": IntegratedGradients(model).attribute(x, target=1, n_steps=8),
        "saliency": Saliency(model).attribute(x, target=torch.tensor([0, 3], device=device)),
        "occlusion": Occlusion(model).attribute(x, (3, 2, 2), strides=(3, 2, 2), target=2),
        "ablation": FeatureAblation(model).attribute(
            x[:1], target=4, feature_mask=torch.arange(192, device=device).reshape(1, 3, 8, 8) // 32
        ),
        "layer": LayerGradCam(model, model[0]).attribute(x, target=0),
    }
