"""Tests of settings under the names of another product."""

import pytest
from wooly_bus.other_names import CLIENT, EXECUTOR, translated

GIVEN = {
    "WOOLYAI_WEIGHTS_DEDUP": ("1", "tenant"),
    "WOOLYAI_VRAM_OVERCOMMIT_PERCENT": ("150", "150"),
    "WOOLYAI_GPU_IDS": ("3", "3"),
    "WOOLYAI_RESERVED_VRAM_MIB": ("2048", str(2 << 30)),
}


@pytest.mark.parametrize("name", [*CLIENT, *EXECUTOR], ids=lambda n: n.theirs)
def test_other_name_gives_our_variable_its_value(name):
    said, value = GIVEN[name.theirs]
    assert translated({name.theirs: said}, [name]) == ({name.ours: value}, [])
    assert translated({name.theirs: said, name.ours: value}, [name]) == ({}, [])
    found, (warning,) = translated({name.theirs: said, name.ours: "7"}, [name])
    assert not found and name.theirs in warning and f"{name.ours}=7 counts" in warning


@pytest.mark.parametrize(
    ("theirs", "value", "cure"),
    [
        ("WOOLYAI_WEIGHTS_DEDUP", "yes", "use 0 or 1"),
        ("WOOLYAI_GPU_IDS", "0,1", "start one for each"),
        ("WOOLYAI_RESERVED_VRAM_MIB", "2GiB", "whole number of MiB"),
    ],
)
def test_other_name_with_an_invalid_value_raises_with_both_names(theirs, value, cure):
    (name,) = [n for n in (*CLIENT, *EXECUTOR) if n.theirs == theirs]
    with pytest.raises(ValueError, match=f"{theirs}={value}: .*{cure}.*{name.ours}"):
        translated({theirs: value}, [name])
