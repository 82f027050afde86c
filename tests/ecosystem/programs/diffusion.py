"""Diffusers: a small UNet is trained to denoise, then a pipeline draws samples with several schedulers."""

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    UNet2DModel,
)


def run(device):
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
    ).to(device)
    schedule = DDPMScheduler(num_train_timesteps=50)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    clean = torch.arange(4 * 3 * 256.0).reshape(4, 3, 16, 16).sin().to(device)
    losses = []
    for step in range(4):
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(step)).to(device)
        times = torch.tensor([3, 11, 29, 41], device=device)
        predicted = unet(schedule.add_noise(clean, noise, times), times).sample
        loss = torch.nn.functional.mse_loss(predicted, noise)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    images = {}
    for name, scheduler in {"ddpm": schedule, "ddim": DDIMScheduler(num_train_timesteps=50)}.items():
        pipeline = DDPMPipeline(unet.eval(), scheduler)
        pipeline.set_progress_bar_config(disable=True)
        drawn = pipeline(
            batch_size=2, num_inference_steps=4, generator=torch.Generator().manual_seed(7), output_type="np"
        )
        images[name] = torch.from_numpy(drawn.images)
    solver = DPMSolverMultistepScheduler(num_train_timesteps=50)
    solver.set_timesteps(4, device=device)
    sample = torch.randn((1, 3, 16, 16), generator=torch.Generator().manual_seed(3)).to(device)
    with torch.no_grad():
        for t in solver.timesteps:
            sample = solver.step(unet(sample, t).sample, t, sample).prev_sample
        vae = AutoencoderKL(
            block_out_channels=(16, 16),
            norm_num_groups=4,
            latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        ).to(device)
        decoded = vae.decode(vae.encode(clean).latent_dist.mode()).sample
    return {"losses": losses, **images, "solver": sample, "decoded": decoded}
