"""Programs of other people's libraries: run on "cuda" under Wooly, each result equals the CPU's bit for bit, or nearly.

The libraries are not among the requirements of a checkout: `make ecosystem` installs them beside it and runs these tests.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
#: For each program in `programs/`: the module that it needs.
PROGRAMS = {
    "attention_variants": "x_transformers",
    "attributions": "captum",
    "bayesian_optimization": "botorch",
    "diffusion": "diffusers",
    "eight_bit_training": "bitsandbytes",
    "fused_kernels": "liger_kernel",
    "gaussian_process": "gpytorch",
    "graph_networks": "torch_geometric",
    "ignite_engine": "ignite",
    "image_processing": "kornia",
    "interatomic_potential": "mace",
    "lightning_trainer": "lightning",
    "medical_segmentation": "monai",
    "metric_learning": "pytorch_metric_learning",
    "ordinary_differential_equations": "torchdiffeq",
    "preference_training": "trl",
    "private_training": "opacus",
    "probabilistic_program": "pyro",
    "quantised_weights": "torchao",
    "reinforcement_learning": "torchrl",
    "scikit_wrapper": "skorch",
    "sentence_embeddings": "sentence_transformers",
    "sparse_adjacency": "torch_geometric",
    "vector_quantisation": "vector_quantize_pytorch",
}
#: Programs whose results may differ in the last bits: the largest difference, and the reason.
DIFFERENT = {
    "diffusion": (1e-5, "the gradient of GroupNorm with channels-last input: docs/concepts/differences.md"),
    "eight_bit_training": (1e-4, "on CPUs, bitsandbytes has other kernels than on GPUs"),
    "fused_kernels": (1e-4, "the CPU's results come from PyTorch's own operations"),
}


def results_of(command, name, device, folder):
    file = folder / f"{device}.pt"
    done = subprocess.run(
        [*command, str(HERE / "one.py"), name, device, str(file)],
        # A stack of the user's own may run here, with another number of threads.
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WOOLYAI_STATE_DIR": str(folder / "state")},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return torch.load(file)


def test_every_program_is_listed():
    assert {p.stem for p in (HERE / "programs").glob("[!_]*.py")} == set(PROGRAMS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_has_results_of_cpu(tmp_path, name):
    if importlib.util.find_spec(PROGRAMS[name]) is None:
        pytest.skip(f"needs {PROGRAMS[name]}: run make ecosystem")
    expected = results_of([sys.executable], name, "cpu", tmp_path)
    found = results_of([sys.executable, "-m", "wooly", "run"], name, "cuda", tmp_path)
    most, _ = DIFFERENT.get(name, (0, ""))
    assert found.keys() == expected.keys()
    for key, theirs in expected.items():
        torch.testing.assert_close(
            found[key], theirs, rtol=0, atol=most, equal_nan=True, msg=lambda m, key=key: f"{key}: {m}"
        )
