"""BoTorch: a Gaussian process is fitted and an acquisition function is optimized."""

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from gpytorch.mlls import ExactMarginalLogLikelihood


def run(device):
    x = torch.linspace(0, 1, 12, dtype=torch.float64, device=device).reshape(6, 2)
    y = -(x - 0.4).square().sum(1, keepdim=True)
    model = SingleTaskGP(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), optimizer_kwargs={"options": {"maxiter": 20}})
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64, device=device)
    torch.manual_seed(0)
    candidate, value = optimize_acqf(
        LogExpectedImprovement(model, best_f=y.max()),
        bounds,
        q=1,
        num_restarts=2,
        raw_samples=8,
        options={"maxiter": 10, "seed": 5},
    )
    return {"candidate": candidate, "value": value, "posterior": model.posterior(x).mean}
