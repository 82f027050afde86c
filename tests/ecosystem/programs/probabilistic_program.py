"""Pyro: variational inference with an automatic guide, and Hamiltonian Monte Carlo."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal


def model(x, y):
    slope = pyro.sample("slope", dist.Normal(x.new_zeros(3), x.new_ones(3)).to_event(1))
    bias = pyro.sample("bias", dist.Normal(x.new_zeros(()), x.new_ones(())))
    scale = pyro.sample("scale", dist.HalfNormal(x.new_ones(())))
    with pyro.plate("data", x.size(0)):
        return pyro.sample("y", dist.Normal(x @ slope + bias, scale + 0.1), obs=y)


def run(device):
    x = torch.arange(120.0).reshape(40, 3).sin().to(device)
    y = x @ torch.tensor([1.0, -2.0, 0.5], device=device) + 0.3
    pyro.set_rng_seed(0)
    guide = AutoNormal(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO(num_particles=2))
    losses = [svi.step(x, y) for _ in range(15)]
    medians = guide.median(x, y)
    pyro.set_rng_seed(1)
    chain = MCMC(NUTS(model, max_tree_depth=3), num_samples=5, warmup_steps=5, disable_progbar=True)
    chain.run(x, y)
    return {"losses": losses, "slope": medians["slope"], "chain": chain.get_samples()["slope"]}
