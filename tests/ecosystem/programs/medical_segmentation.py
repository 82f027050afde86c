"""MONAI: a 3D UNet is trained; losses, metrics, inference by windows, and transforms of volumes."""

import torch
from monai.data import decollate_batch
from monai.inferers import SlidingWindowInferer
from monai.losses import DiceCELoss, HausdorffDTLoss, TverskyLoss
from monai.metrics import DiceMetric, HausdorffDistanceMetric, MeanIoU, SurfaceDistanceMetric
from monai.networks.nets import UNet
from monai.transforms import AsDiscrete, GaussianSmooth, NormalizeIntensity, Rand3DElastic, Rotate, Zoom


def run(device):
    volume = torch.arange(2 * 32**3.0).reshape(2, 1, 32, 32, 32).mul(0.01).sin().to(device)
    labels = (volume > 0.2).long() + (volume > 0.7).long()
    model = UNet(3, 1, 3, channels=(8, 16, 32), strides=(2, 2), num_res_units=2).to(device)
    optimizer, loss_of = torch.optim.Adam(model.parameters(), 1e-3), DiceCELoss(to_onehot_y=True, softmax=True)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        predicted = model(volume)
        loss = loss_of(predicted, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    predicted = predicted.detach()
    results = {"losses": losses}
    for loss_type in (HausdorffDTLoss, TverskyLoss):
        results[loss_type.__name__] = loss_type(to_onehot_y=True, softmax=True)(predicted, labels)
    hard, truth = AsDiscrete(argmax=True, to_onehot=3), AsDiscrete(to_onehot=3)
    pairs = [hard(p) for p in decollate_batch(predicted)], [truth(y) for y in decollate_batch(labels)]
    for metric in (DiceMetric(), MeanIoU(), HausdorffDistanceMetric(percentile=95), SurfaceDistanceMetric()):
        metric(*pairs)
        results[type(metric).__name__] = metric.aggregate()
    windows = SlidingWindowInferer((16, 16, 16), 2, overlap=0.25, mode="gaussian")
    results["windows"] = windows(volume, model.eval())
    elastic = Rand3DElastic((3, 4), (10, 20), prob=1.0, rotate_range=0.2).set_random_state(0)
    for transform in (
        NormalizeIntensity(nonzero=True),
        Rotate((0.3, 0.2, 0.1)),
        Zoom(1.3),
        GaussianSmooth(1.0),
        elastic,
    ):
        results[type(transform).__name__] = transform(volume[0])
    return {k: v.as_subclass(torch.Tensor) if isinstance(v, torch.Tensor) else v for k, v in results.items()}
