"""TorchRL: PPO with advantages, double DQN from a replay buffer, DDPG and a recurrent policy, on tensor dictionaries."""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Bounded, LazyTensorStorage, OneHot, TensorDictReplayBuffer
from torchrl.modules import (
    MLP,
    Actor,
    LSTMModule,
    NormalParamExtractor,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
    set_recurrent_mode,
)
from torchrl.objectives import ClipPPOLoss, DDPGLoss, DQNLoss, SoftUpdate
from torchrl.objectives.value import GAE, TD0Estimator, TDLambdaEstimator

ENVIRONMENTS, STEPS, OBSERVED, ACTIONS = 4, 8, 5, 2


class Quality(torch.nn.Module):
    """The value of an action."""

    def __init__(self):
        super().__init__()
        self.layers = MLP(in_features=OBSERVED + ACTIONS, out_features=1, num_cells=[16])

    def forward(self, observation, action):
        return self.layers(torch.cat([observation, action], -1))


def experience(device):
    generator = torch.Generator().manual_seed(0)
    batch = ENVIRONMENTS, STEPS

    def random(size):
        return torch.randn(*batch, size, generator=generator)

    found = TensorDict(
        {
            "observation": random(OBSERVED),
            "action": torch.rand(*batch, ACTIONS, generator=generator) * 1.6 - 0.8,
            "next": {
                "observation": random(OBSERVED),
                "reward": random(1),
                "done": torch.zeros(*batch, 1, dtype=torch.bool),
                "terminated": torch.zeros(*batch, 1, dtype=torch.bool),
            },
        },
        batch,
    )
    found["next", "done"][:, 5] = True
    return found.to(device)


def trained(results, name, loss, batch, before=lambda k: None):
    """Train for three steps."""
    optimizer = torch.optim.Adam(loss.parameters(), 1e-2)
    for k in range(3):
        before(k)
        total = sum(v for key, v in loss(batch(k)).items() if key.startswith("loss"))
        total.backward()
        torch.nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        results[f"{name} {k}"] = total


def run(device):
    results, played = {}, experience(device)
    spec = Bounded(-torch.ones(ACTIONS), torch.ones(ACTIONS), device=device)
    critic = ValueOperator(
        MLP(in_features=OBSERVED, out_features=1, num_cells=[16]).to(device), in_keys=["observation"]
    )

    net = torch.nn.Sequential(
        MLP(in_features=OBSERVED, out_features=2 * ACTIONS, num_cells=[16, 16]), NormalParamExtractor()
    )
    policy = ProbabilisticActor(
        TensorDictModule(net.to(device), ["observation"], ["loc", "scale"]),
        spec=spec,
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    with torch.no_grad():
        played["action_log_prob"] = policy.get_dist(played).log_prob(played["action"])
    advantages = GAE(gamma=0.9, lmbda=0.9, value_network=critic, average_gae=True)
    loss = ClipPPOLoss(policy, critic, entropy_bonus=False)
    trained(results, "ppo", loss, lambda k: played.reshape(-1), before=lambda k: advantages(played))
    results["advantage"] = played["advantage"]
    for estimator, more in ((TD0Estimator, {}), (TDLambdaEstimator, {"lmbda": 0.8})):
        other = played.clone()
        estimator(gamma=0.9, value_network=critic, **more)(other)
        results[estimator.__name__] = other["advantage"]

    torch.manual_seed(1)
    layers = MLP(in_features=OBSERVED, out_features=3, num_cells=[16]).to(device)
    loss = DQNLoss(
        QValueActor(layers, spec=OneHot(3, device=device), in_keys=["observation"]), delay_value=True, double_dqn=True
    )
    loss.make_value_estimator(gamma=0.9)
    target = SoftUpdate(loss, eps=0.9)
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(100, device=device), batch_size=16)
    flat = played.reshape(-1).select("observation", "next").clone()
    flat["action"] = torch.nn.functional.one_hot(torch.arange(len(flat)) % 3, 3).to(device)
    replay.extend(flat)
    trained(results, "dqn", loss, lambda k: replay[torch.arange(16) + k], before=lambda k: target.step() if k else None)

    torch.manual_seed(2)
    layers = torch.nn.Sequential(MLP(in_features=OBSERVED, out_features=ACTIONS, num_cells=[16]), torch.nn.Tanh())
    quality = ValueOperator(Quality().to(device), in_keys=["observation", "action"])
    loss = DDPGLoss(Actor(layers.to(device), spec=spec), quality, delay_actor=True, delay_value=True)
    loss.make_value_estimator(gamma=0.9)
    trained(results, "ddpg", loss, lambda k: played.reshape(-1))

    lstm = LSTMModule(input_size=OBSERVED, hidden_size=8, in_key="observation", out_key="seen").to(device)
    sequence = played.select("observation").clone()
    sequence["is_init"] = torch.zeros(ENVIRONMENTS, STEPS, 1, dtype=torch.bool, device=device)
    sequence["is_init"][:, 3] = True
    for state in "hc":
        sequence[f"recurrent_state_{state}"] = torch.zeros(ENVIRONMENTS, STEPS, 1, 8, device=device)
    with set_recurrent_mode(True):
        results["lstm"] = lstm(sequence)["seen"]

    results["stacked"] = torch.stack([played, played.clone()], 0)["observation"]
    results["masked"] = played[played["next", "done"].squeeze(-1)]["observation"]
    index = torch.tensor([[1, 2], [3, 4], [0, 0], [7, 6]], device=device)
    results["gathered"] = played.gather(1, index)["next", "reward"]
    results["zeros"] = torch.zeros_like(played)["action"]
    return results
