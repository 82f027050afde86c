"""For each of Hugging Face's architectures, forward, loss and all gradients on the device equal the CPU's in every bit."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES

pytestmark = pytest.mark.connected


def tensors(output):
    """All tensors of a model's output on the host, including its caches."""
    values = dict(output)
    caches = [v for v in values.values() if hasattr(v, "layers")]
    flat = tree_flatten([values, [[vars(layer) for layer in c.layers] for c in caches]])[0]
    return [t.detach().cpu() for t in flat if isinstance(t, torch.Tensor)]


def results(model, inputs, device):
    """A model's results in evaluation and in training, and all of its gradients."""
    inputs = tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, inputs)
    with torch.no_grad():
        evaluated = tensors(model.eval()(**inputs))
    output = model.train()(**inputs)
    loss = output.get("loss")
    if loss is None:
        loss = sum(t.square().mean() for t in tree_flatten(dict(output))[0] if torch.is_tensor(t) and t.requires_grad)
    loss.backward()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return [loss.detach().cpu(), *evaluated], tensors(output), gradients


#: One model per kind of computation: relative positions, convolutions, images, sound, experts, states. The slow ones are
#: variations of these.
QUICK = {
    "llama",
    "deberta-v2",
    "t5",
    "whisper",
    "vit",
    "convnext",
    "qwen2-moe",
    "mamba",
}


def architectures():
    for name in ARCHITECTURES:
        yield pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("name", list(architectures()))
def test_model_equals_cpu_bitwise(cuda, name):
    architecture = ARCHITECTURES[name]
    theirs = architecture.build()
    ours = copy.deepcopy(theirs).to(cuda)
    assert all(t.is_cuda for t in ours.state_dict().values())
    inputs = architecture.inputs()
    mine, other = results(ours, inputs, cuda), results(theirs, inputs, "cpu")
    for found, right in zip(mine[:2], other[:2], strict=True):
        assert len(found) == len(right) > 1
        unlike = [
            n for n, (a, b) in enumerate(zip(found, right, strict=True)) if a.dtype != b.dtype or not torch.equal(a, b)
        ]
        assert unlike == []
    assert mine[2].keys() == other[2].keys()
    assert [name for name, g in other[2].items() if not torch.equal(mine[2][name], g)] == []
    assert any(g.any() for g in other[2].values())
    unlike = [name for name, t in theirs.state_dict().items() if not torch.equal(ours.state_dict()[name].cpu(), t)]
    assert unlike == []  # buffers that training changes


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations_equal_cpu(cuda, attention):
    theirs = ARCHITECTURES["qwen3"].build(attn_implementation=attention)
    inputs = ARCHITECTURES["qwen3"].inputs()
    mine = results(copy.deepcopy(theirs).to(cuda), inputs, cuda)
    for found, right in zip(mine[:2], results(theirs, inputs, "cpu")[:2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_training_with_dropout_depends_only_on_seed(cuda):
    model = ARCHITECTURES["bert"].build().to(cuda).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    inputs = {k: v.to(cuda) for k, v in ARCHITECTURES["bert"].inputs().items()}

    def loss(seed):
        torch.cuda.manual_seed(seed)
        return model(**inputs).loss.item()

    assert loss(1) == loss(1) != loss(2)


def test_architectures_cover_all_families():
    families = {a.family for a in ARCHITECTURES.values()}
    assert families == {ARCHITECTURES[name].family for name in QUICK}
    assert families == {"decoder", "encoder", "encoder-decoder", "vision", "speech", "experts", "state space"}
    assert len({a.model for a in ARCHITECTURES.values()}) >= 60
