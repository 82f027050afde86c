"""Pyro: a mixture model whose assignments are summed out, fitted by maximum a posteriori; then its assignments are inferred."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate, infer_discrete
from pyro.infer.autoguide import AutoDelta
from pyro.infer.autoguide.initialization import init_to_value

COMPONENTS = 3


@config_enumerate
def model(data):
    weights = pyro.sample("weights", dist.Dirichlet(data.new_full((COMPONENTS,), 0.5)))
    scale = pyro.sample("scale", dist.LogNormal(data.new_zeros(()), data.new_ones(())))
    with pyro.plate("components", COMPONENTS):
        places = pyro.sample("places", dist.Normal(data.new_zeros(()), data.new_full((), 10.0)))
    with pyro.plate("data", len(data)):
        assignment = pyro.sample("assignment", dist.Categorical(weights))
        pyro.sample("seen", dist.Normal(places[assignment], scale), obs=data)


def run(device):
    pyro.clear_param_store()
    data = torch.cat([torch.linspace(-1, 1, 20) + center for center in (-5.0, 0.0, 6.0)]).to(device)
    begin = {
        "weights": torch.full((COMPONENTS,), 1 / COMPONENTS, device=device),
        "scale": torch.tensor(2.0, device=device),
        "places": torch.tensor([-4.0, 1.0, 5.0], device=device),
    }
    guide = AutoDelta(pyro.poutine.block(model, expose=list(begin)), init_loc_fn=init_to_value(values=begin))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), TraceEnum_ELBO(max_plate_nesting=1))
    losses = [svi.step(data) for _ in range(15)]
    trace = pyro.poutine.trace(guide).get_trace(data)
    fitted = pyro.poutine.replay(model, trace=trace)
    inferred = infer_discrete(fitted, temperature=0, first_available_dim=-2)
    assignments = pyro.poutine.trace(inferred).get_trace(data).nodes["assignment"]["value"]
    return {"losses": losses, "places": guide.median(data)["places"], "assignments": assignments}
