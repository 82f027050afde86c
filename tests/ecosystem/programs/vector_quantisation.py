"""vector-quantize-pytorch: codebooks that learn by moving averages, by gradients or not at all."""

import torch
from vector_quantize_pytorch import FSQ, LFQ, ResidualFSQ, ResidualVQ, SimVQ, VectorQuantize

ALIVE = {"threshold_ema_dead_code": 0}  # replacing unused codes would take random numbers
CODEBOOKS = {
    "moving averages": lambda: VectorQuantize(dim=8, codebook_size=16, decay=0.8, **ALIVE),
    "cosines": lambda: VectorQuantize(dim=8, codebook_size=16, use_cosine_sim=True, **ALIVE),
    "gradients": lambda: VectorQuantize(
        dim=8, codebook_size=16, learnable_codebook=True, ema_update=False, orthogonal_reg_weight=1.0
    ),
    "heads": lambda: VectorQuantize(
        dim=8, heads=2, separate_codebook_per_head=True, codebook_dim=4, codebook_size=8, **ALIVE
    ),
    "residual": lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=16, **ALIVE),
    "finite scalars": lambda: FSQ(levels=[8, 5, 5], dim=8),
    "residual finite scalars": lambda: ResidualFSQ(dim=8, levels=[4, 4], num_quantizers=2),
    "lookup-free": lambda: LFQ(codebook_size=16, dim=8, entropy_loss_weight=0.1),
    "rotation trick": lambda: SimVQ(dim=8, codebook_size=16, rotation_trick=True),
}


def run(device):
    results = {}
    x = torch.arange(2.0 * 16 * 8).reshape(2, 16, 8).mul(0.37).sin().to(device)
    for name, make in CODEBOOKS.items():
        torch.manual_seed(0)
        model = make().to(device)
        for _ in range(3):
            z = x.clone().requires_grad_()
            quantised, indices, *losses = model(z)
            loss = quantised.square().mean() + sum(part.sum() for part in losses if isinstance(part, torch.Tensor))
            loss.backward()
        results |= {name: quantised, f"{name} indices": indices, f"{name} gradient": z.grad}
    return results
