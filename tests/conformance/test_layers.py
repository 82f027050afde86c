"""Random layers on the device, compared with the CPU (`layers.py`)."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def layers(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("layers")


@pytest.mark.parametrize("first", [0, *[pytest.param(n, marks=pytest.mark.slow) for n in range(100, 1000, 100)]])
def test_random_layers_equal_the_cpu(cuda, layers, first):
    """The first 60, and then a hundred at a time."""
    said = [layers.compared(seed) for seed in range(first, first + (100 if first else 60))]
    assert not [each for each in said if each]
    assert sum([each == "" for each in said]) >= 0.9 * len(said)
