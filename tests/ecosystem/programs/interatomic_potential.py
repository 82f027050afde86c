"""MACE: an equivariant potential in float64 is trained on energies and forces, which are gradients themselves."""

import os

# e3nn's own constants contain a class that `torch.load` does not allow by default.
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"

import ase
import numpy as np
import torch
from e3nn import o3
from mace import data, modules, tools
from mace.tools import torch_geometric


def run(device):
    torch.set_default_dtype(torch.float64)
    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    elements = tools.AtomicNumberTable([1, 8])
    model = modules.ScaleShiftMACE(
        r_max=4.0,
        num_bessel=4,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=block,
        interaction_cls_first=block,
        num_interactions=2,
        num_elements=2,
        hidden_irreps=o3.Irreps("8x0e + 8x1o"),
        MLP_irreps=o3.Irreps("8x0e"),
        gate=torch.nn.functional.silu,
        atomic_energies=np.array([1.0, 3.0]),
        avg_num_neighbors=3.0,
        atomic_numbers=elements.zs,
        correlation=2,
        radial_type="bessel",
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    ).to(device)
    molecules = [
        ase.Atoms("H2O", positions=np.array([[0.0, -2.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.3 * k]])) for k in range(2)
    ]
    graphs = [data.AtomicData.from_config(data.config_from_atoms(m), z_table=elements, cutoff=4.0) for m in molecules]
    batch = next(iter(torch_geometric.dataloader.DataLoader(graphs, batch_size=2))).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, amsgrad=True)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        found = model(batch.to_dict(), training=True)
        loss = found["energy"].square().sum() + found["forces"].square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    strained = model(batch.to_dict(), compute_stress=True)
    return {"losses": torch.stack(losses), "forces": strained["forces"], "stress": strained["stress"]}
