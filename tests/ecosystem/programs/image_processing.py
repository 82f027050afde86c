"""Kornia: colours, filters, geometry, augmentation with given parameters, losses; gradients through them."""

import kornia
import torch


def run(device):
    x = torch.arange(2 * 3 * 32 * 32.0).reshape(2, 3, 32, 32).sin().mul(0.5).add(0.5).to(device).requires_grad_()
    results = {
        "lab": kornia.color.rgb_to_lab(x),
        "hsv": kornia.color.rgb_to_hsv(x),
        "gray": kornia.color.rgb_to_grayscale(x),
        "blur": kornia.filters.gaussian_blur2d(x, (5, 5), (1.5, 1.5)),
        "median": kornia.filters.median_blur(x, (3, 3)),
        "sobel": kornia.filters.sobel(x),
        "canny": kornia.filters.canny(x)[0],
        "rotated": kornia.geometry.transform.rotate(x, torch.tensor([30.0, -45.0], device=device)),
        "resized": kornia.geometry.transform.resize(x, (20, 24), antialias=True),
        "pyramid": kornia.geometry.transform.pyrdown(x),
        "equalized": kornia.enhance.equalize(x),
        "dilated": kornia.morphology.dilation(x, torch.ones(3, 3, device=device)),
        "harris": kornia.feature.harris_response(kornia.color.rgb_to_grayscale(x)),
    }
    points = torch.tensor([[[0.0, 0], [31, 0], [31, 31], [0, 31]]], device=device).repeat(2, 1, 1)
    moved = points + torch.tensor([[[2.0, 3], [-1, 2], [-4, -3], [1, -2]]], device=device)
    homography = kornia.geometry.transform.get_perspective_transform(points, moved)
    results["warped"] = kornia.geometry.transform.warp_perspective(x, homography, (32, 32))
    results["ssim"] = kornia.losses.ssim_loss(x, results["blur"], 5)
    total = sum(value.sum() for value in results.values() if value.requires_grad)
    total.backward()
    return {**results, "gradient": x.grad}
