"""torchdiffeq: adaptive and fixed solvers, the adjoint method, events."""

import torch
from torchdiffeq import odeint, odeint_adjoint, odeint_event


class Field(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))

    def forward(self, t, y):
        return self.net(y**3)


def run(device):
    field = Field().to(device)
    start, times = torch.tensor([[2.0, 0.0]], device=device), torch.linspace(0, 2, 8, device=device)
    optimizer = torch.optim.RMSprop(field.parameters(), lr=1e-3)
    losses = []
    for method, solve in (("dopri5", odeint_adjoint), ("rk4", odeint), ("dopri8", odeint), ("implicit_adams", odeint)):
        optimizer.zero_grad()
        loss = solve(field, start, times, method=method).abs().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    height = torch.tensor([1.0, 0.0], device=device)

    def fall(t, y):
        return torch.stack([y[1], -9.81 * torch.ones_like(y[1])])

    when, states = odeint_event(
        fall, height, torch.tensor(0.0, device=device), event_fn=lambda t, y: y[0], method="dopri5"
    )
    return {"losses": losses, "when": when, "states": states}
