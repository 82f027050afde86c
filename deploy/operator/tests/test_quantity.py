"""Memory quantities of Kubernetes."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wooly_operator.core.quantity import LIMIT, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("8Gi", 8 << 30),
        ("1.5Gi", 3 << 29),
        ("500M", 500_000_000),
        ("16k", 16_000),
        ("0.5", 1),
        (" 2Ti ", 2 << 40),
    ],
)
def test_parse_bytes_quantity_returns_bytes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "8GB", "8gi", "1e3", "Gi", "1.2.3", "９", "0.0Gi", "9" * 20 + "Ei", "8 Gi"]
)
def test_parse_bytes_invalid_text_raises(text):
    with pytest.raises(ValueError, match=r"memory|between"):
        parse_bytes(text)


@given(st.integers(1, LIMIT - 1))
def test_parse_bytes_round_trips(nbytes):
    assert parse_bytes(str(nbytes)) == nbytes


@given(st.text(max_size=30))
def test_parse_bytes_any_text_returns_or_raises_value_error(text):
    with contextlib.suppress(ValueError):
        assert 0 < parse_bytes(text) < LIMIT
