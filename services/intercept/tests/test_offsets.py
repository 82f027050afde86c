"""Calls that differ in the offsets of their operands alone: one is planned, the others follow from its plan."""

import pytest
import torch
from wooly.device import current


@pytest.fixture
def built(cuda, monkeypatch):
    """The operators whose calls were planned without another plan."""
    builder, found = current().generic._builder, []
    build = builder.build
    monkeypatch.setattr(builder, "build", lambda facts, *args: found.append(facts.name) or build(facts, *args))
    return found


def rows(device, at):
    x, y = torch.arange(60.0, device=device).view(20, 3), torch.arange(40.0, device=device).flip(0)
    found = []
    for i in at:
        z = x[i] * y[i : i + 3] + 1
        x[i].add_(z).clamp_(max=1000)
        found += [z, torch.cat([x[i], y[i : i + 2]]), x[i].sum(), torch.stack([x[i], x[i + 1]]).softmax(0)]
    return [t.tolist() for t in [*found, x, y]]


def test_calls_with_new_offsets_equal_the_cpu_and_are_not_planned_anew(cuda, built):
    assert rows(cuda, range(2)) == rows("cpu", range(2))
    del built[:]
    assert rows(cuda, range(3, 19, 2)) == rows("cpu", range(3, 19, 2))
    assert built == []


def test_another_shape_stride_or_dtype_at_another_offset_is_planned(cuda, built):
    x = torch.arange(60.0, device=cuda).view(20, 3)
    torch.atan(x[1])
    for other in (x[2][:2], x.t()[1][:3], x[3].double()):
        del built[:]
        assert torch.equal(torch.atan(other).cpu(), torch.atan(other.cpu()))
        assert "aten.atan.default" in built


def test_overlap_at_another_offset_is_found(cuda):
    x = torch.zeros(12, device=cuda)
    x[:3].add_(x[6:9])
    x[1:4].add_(x[7:10])
    with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor"):
        x[2:5].add_(x[3:6])
    x[3:6].add_(x[0:3] + 1)
    assert x.tolist() == [0.0] * 3 + [1.0] * 3 + [0.0] * 6


def test_error_of_a_call_is_raised_at_each_offset(cuda):
    x = torch.zeros(9, device=cuda)
    for at in range(3):
        with pytest.raises(RuntimeError, match="must match the size"):
            x[at : at + 3] + x[at : at + 2]
