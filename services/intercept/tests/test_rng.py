"""Random state of the device: generators, seeds, saved and restored states, and checkpointing."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

DRAWS = {
    "randn": lambda d, g: torch.randn(5, device=d, generator=g),
    "rand": lambda d, g: torch.rand(5, device=d, generator=g),
    "randint": lambda d, g: torch.randint(0, 1000, (5,), device=d, generator=g),
    "randperm": lambda d, g: torch.randperm(50, device=d, generator=g),
    "rand_like": lambda d, g: torch.rand_like(torch.empty(5, device=d), generator=g),
    "normal": lambda d, g: torch.normal(torch.zeros(5, device=d), 1.0, generator=g),
    "normal of sizes": lambda d, g: torch.normal(0.0, 1.0, (5,), device=d, generator=g),
    "bernoulli": lambda d, g: torch.bernoulli(torch.full((64,), 0.5, device=d), generator=g),
    "multinomial": lambda d, g: torch.multinomial(torch.ones(64, device=d), 8, generator=g),
    "poisson": lambda d, g: torch.poisson(torch.full((9,), 30.0, device=d), generator=g),
    "normal_": lambda d, g: torch.empty(5, device=d).normal_(generator=g),
    "uniform_": lambda d, g: torch.empty(5, device=d).uniform_(generator=g),
    "random_": lambda d, g: torch.empty(5, device=d).random_(1000, generator=g),
    "exponential_": lambda d, g: torch.empty(5, device=d).exponential_(generator=g),
    "geometric_": lambda d, g: torch.empty(9, device=d).geometric_(0.01, generator=g),
    "bernoulli_": lambda d, g: torch.empty(64, device=d).bernoulli_(0.5, generator=g),
    "trunc_normal_": lambda d, g: nn.init.trunc_normal_(torch.empty(5, device=d), generator=g),
    "kaiming_uniform_": lambda d, g: nn.init.kaiming_uniform_(torch.empty(3, 3, device=d), generator=g),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_operator_draws_from_given_generator(cuda, draw):
    default = torch.cuda.get_rng_state()
    generator = torch.Generator("cuda").manual_seed(5)
    first, second = draw(cuda, generator), draw(cuda, generator)
    assert not torch.equal(first, second)
    assert torch.equal(draw(cuda, generator.manual_seed(5)), first) and first.is_cuda
    assert torch.equal(torch.cuda.get_rng_state(), default)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_generator_of_other_device_raises(cuda, draw):
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        draw(cuda, torch.Generator())
    with pytest.raises(RuntimeError, match=r"Expected a 'cpu' (device type for generator|generator device) but found"):
        draw("cpu", torch.Generator("cuda"))


def test_generator_reports_cuda(cuda):
    for g in (torch.Generator("cuda"), torch.Generator(device="cuda:0"), torch.Generator(torch.device("cuda"))):
        assert isinstance(g, torch.Generator) and g.device == torch.device("cuda", 0)
    host = torch.Generator()
    assert isinstance(host, torch.Generator) and type(host) is torch._C.Generator and host.device.type == "cpu"
    assert not isinstance(3, torch.Generator)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.Generator("cuda:99")


def test_generator_state_round_trips(cuda):
    g = torch.Generator("cuda")
    assert g.manual_seed(11) is g and g.initial_seed() == 11 and g.get_offset() == 0
    torch.randn(2, device=cuda, generator=g)
    state = g.get_state()
    assert state.dtype == torch.uint8 and state.device.type == "cpu" and state.shape == (16,)
    expected = torch.randn(4, device=cuda, generator=g)
    twins = [g.set_state(state).clone_state(), copy.deepcopy(g), pickle.loads(pickle.dumps(g))]  # noqa: S301  # scripts pickle generators
    shared = g.graphsafe_get_state()
    for twin in (*twins, shared):
        assert torch.equal(torch.randn(4, device=cuda, generator=twin), expected)
    assert not torch.equal(
        torch.randn(4, device=cuda, generator=g), expected
    )  # the generator that shares the sequence has drawn this number
    assert g.seed() == g.initial_seed() != 11


@pytest.mark.parametrize("seed", [-1, 2**64 - 1, 2**63, 0])
def test_generator_accepts_64_bit_seed(cuda, seed):
    g = torch.Generator("cuda").manual_seed(seed)
    assert g.initial_seed() == torch.Generator().manual_seed(seed).initial_seed()
    first = torch.randn(3, device=cuda, generator=g)
    assert torch.equal(torch.randn(3, device=cuda, generator=g.manual_seed(seed)), first)


def test_invalid_state_raises_error_of_cuda(cuda):
    g = torch.Generator("cuda")
    with pytest.raises(TypeError, match=r"RNG state must be a torch\.ByteTensor"):
        g.set_state(torch.zeros(16))
    with pytest.raises(RuntimeError, match="RNG state is wrong size"):
        torch.cuda.set_rng_state(torch.zeros(3, dtype=torch.uint8))


def test_torch_manual_seed_seeds_device(cuda):
    torch.manual_seed(8)
    first = torch.rand(3, device=cuda)
    assert torch.cuda.initial_seed() == 8 == torch.cuda.default_generators[0].initial_seed()
    torch.cuda.manual_seed_all(8)
    assert torch.equal(torch.rand(3, device=cuda), first)
    torch.cuda.default_generators[0].manual_seed(8)
    assert torch.equal(torch.rand(3, device=cuda), first)
    assert torch.seed() == torch.cuda.initial_seed()


def test_device_state_round_trips(cuda):
    one, every = torch.cuda.get_rng_state("cuda:0"), torch.cuda.get_rng_state_all()
    expected = torch.randn(3, device=cuda)
    torch.cuda.set_rng_state(one, device=0)
    assert torch.equal(torch.randn(3, device=cuda), expected)
    torch.cuda.set_rng_state_all(every)
    assert torch.equal(torch.randn(3, device=cuda), expected)


def test_fork_rng_restores_host_and_device_state(cuda):
    torch.manual_seed(3)
    with torch.random.fork_rng():
        inside = torch.randn(3, device=cuda), torch.randn(3)
    assert torch.equal(torch.randn(3, device=cuda), inside[0]) and torch.equal(torch.randn(3), inside[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_repeats_dropout(cuda, reentrant):
    def grads(how):
        torch.manual_seed(6)
        block = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 4)).to(cuda)
        x = torch.randn(16, 32, device=cuda, requires_grad=True)
        torch.manual_seed(7)
        y = checkpoint(block, x, use_reentrant=reentrant) if how else block(x)
        torch.randn(3, device=cuda)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in block.parameters()), torch.randn(2, device=cuda)]

    for ours, theirs in zip(grads(True), grads(False), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_without_rng_state_draws_new_dropout(cuda, reentrant):
    x = torch.ones(4096, device=cuda, requires_grad=True)
    y = checkpoint(lambda t: nn.functional.dropout(t, 0.5) * t, x, use_reentrant=reentrant, preserve_rng_state=False)
    y.sum().backward()
    assert not torch.equal(x.grad / 2, y.detach())  # both are two times the dropout mask, with different masks


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_keeps_autocast(cuda, reentrant):
    seen = []

    def block(t):
        seen.append((t @ t).dtype)
        return (t @ t).float()

    x = torch.ones(4, 4, device=cuda, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = checkpoint(block, x, use_reentrant=reentrant)
    y.sum().backward()
    assert seen == [torch.bfloat16] * 2


def test_functionalised_random_numbers_equal_those_of_the_eager_function(cuda):
    from functorch.compile import aot_function, nop
    from torch._functorch import config

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.rand_like(x) * (torch.rand(x.shape, device=x.device) + x)

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.rand_like(grad)

    results = []
    for function in (Noisy.apply, aot_function(Noisy.apply, nop, nop)):
        torch.cuda.manual_seed(5)
        x = torch.ones(300, 20, device=cuda, requires_grad=True)
        with config.patch(functionalize_rng_ops=True):  # a monkeypatch's undo would hide the setting
            y = function(x)
            y.sum().backward()
        results.append((y.detach(), x.grad, torch.rand(3, device=cuda)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_default_generator_draws_from_the_state_of_another_one(cuda):
    default, other = torch.cuda.default_generators[0], torch.Generator("cuda").manual_seed(5)
    expected = torch.rand(3, device=cuda, generator=other.clone_state())
    before = torch.cuda.get_rng_state()
    own = default.graphsafe_get_state()
    default.graphsafe_set_state(other)
    assert torch.equal(torch.rand(3, device=cuda), expected) and other.get_offset() == 1
    default.graphsafe_set_state(own)
    assert torch.equal(torch.cuda.get_rng_state(), before) and other.get_offset() == 1
