"""Whole models, trained and run on the device and on the local CPU: every number is equal in every bit.

`test_hugging_face_models` tests the models of Hugging Face.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.connected


def on(device, model):
    return copy.deepcopy(model).to(device)


def assert_same_state(ours, theirs):
    """Check that parameters, buffers and gradients of two models are equal."""
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    assert [name for name in other if not torch.equal(mine[name].cpu(), other[name])] == []
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    assert all(g is not None for g in gradients.values())
    unlike = [name for name, p in ours.named_parameters() if not torch.equal(p.grad.cpu(), gradients[name])]
    assert unlike == []


def losses(device, model, optimizer, steps, loss_of):
    """Train `model` in place and return the loss of every step, read once at the end."""
    seen = []
    for step in range(steps):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    return torch.stack(seen).cpu()


# `test_optimizers` tests single optimizers.
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4),
        lambda p: torch.optim.Adam(p, lr=1e-3),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True), marks=pytest.mark.slow),
        pytest.param(lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5), marks=pytest.mark.slow),
    ],
    ids=["sgd", "adam", "adamw-amsgrad", "rmsprop"],
)
def test_digits_training_equals_cpu_losses(cuda, make):
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32), nn.Tanh(), nn.Linear(32, 10))
    order = torch.randperm(len(x))

    def train(device):
        mine, a, b = on(device, model), x.to(device), y.to(device)
        batches = order.to(device).split(64)

        def loss_of(m, step):
            rows = batches[step % len(batches)]
            return F.cross_entropy(m(a[rows]), b[rows])

        curve = losses(device, mine, make(mine.parameters()), 2 * len(batches), loss_of)
        with torch.no_grad():
            return curve, mine, mine(a).argmax(1).cpu()

    curve, ours, answers = train("cuda")
    expected, theirs, right = train("cpu")
    assert torch.equal(curve, expected) and curve[-1] < curve[0]
    assert torch.equal(answers, right)
    assert_same_state(ours, theirs)


def conv_net(dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16, track_running_stats=True),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(64, 5),
    )


def images():
    own = torch.Generator().manual_seed(2)  # not the default generator, whose seed the device uses, too
    return torch.randn(16, 3, 16, 16, generator=own), torch.randint(0, 5, (16,), generator=own)


def train_conv(device, model, steps=10):
    """Losses of `steps` steps on one batch; the model is trained in place."""
    x, y = (t.to(device) for t in images())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return losses(device, model, optimizer, steps, lambda m, _: F.cross_entropy(m(x), y))


def test_conv_net_with_batch_norm_trains_as_on_cpu(cuda):
    ours, theirs = on("cuda", conv_net()), conv_net()
    curve, expected = train_conv("cuda", ours), train_conv("cpu", theirs)
    assert torch.equal(curve, expected) and curve[-1] < curve[0]
    assert_same_state(ours, theirs)
    assert ours[1].num_batches_tracked.item() == 10
    x, _ = images()
    with torch.no_grad():
        assert torch.equal(ours.eval()(x.to("cuda")).cpu(), theirs.eval()(x))


def test_conv_net_channels_last_trains_as_on_cpu(cuda):
    def train(device):
        model = on(device, conv_net()).to(memory_format=torch.channels_last)
        return train_conv(device, model), model

    (curve, ours), (expected, theirs) = train("cuda"), train("cpu")
    assert torch.equal(curve, expected)
    assert ours[0].weight.stride() == theirs[0].weight.stride()
    assert_same_state(ours, theirs)


def test_conv_net_with_dropout_depends_only_on_seed(cuda):
    def train(seed):
        model = on("cuda", conv_net(dropout=0.5))
        torch.cuda.manual_seed(seed)
        return train_conv("cuda", model), model

    (first, a), (second, b), (other, _) = train(5), train(5), train(6)
    assert torch.equal(first, second)
    assert all(torch.equal(p, q) for p, q in zip(a.cpu().parameters(), b.cpu().parameters(), strict=True))
    assert not torch.equal(first, other)


def test_dropout_in_evaluation_equals_cpu(cuda):
    model = conv_net(dropout=0.5).eval()
    x, _ = images()
    with torch.no_grad():
        assert torch.equal(on("cuda", model)(x.to("cuda")).cpu(), model(x))


class Tagger(nn.Module):
    """An embedding, an LSTM, and a class per token."""

    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 24, batch_first=True, **options)
        self.head = nn.Linear(24 * (2 if options.get("bidirectional") else 1), 7)

    def forward(self, tokens):
        found, (hidden, cell) = self.lstm(self.embedding(tokens))
        return self.head(found), hidden, cell


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}], ids=["plain", "two-layers-both-ways"]
)
def test_lstm_trains_as_on_cpu(cuda, options):
    torch.manual_seed(3)
    model = Tagger(**options)
    tokens, classes = torch.randint(0, 50, (8, 12)), torch.randint(0, 7, (8, 12))

    def train(device):
        mine, x, y = on(device, model), tokens.to(device), classes.to(device)
        optimizer = torch.optim.Adam(mine.parameters(), lr=1e-2)
        curve = losses(device, mine, optimizer, 10, lambda m, _: F.cross_entropy(m(x)[0].flatten(0, 1), y.flatten()))
        return curve, mine, [t.detach().cpu() for t in mine(x)]

    (curve, ours, results), (expected, theirs, right) = train("cuda"), train("cpu")
    assert torch.equal(curve, expected) and curve[-1] < curve[0]
    assert all(torch.equal(a, b) for a, b in zip(results, right, strict=True))
    assert_same_state(ours, theirs)
