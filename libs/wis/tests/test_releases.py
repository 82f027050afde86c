import pytest
from wooly_wis.externs import is_allowed
from wooly_wis.releases import LIFETIMES, NEWEST, OLDEST, lacks, minor_of, mismatch


@pytest.mark.parametrize(
    ("client", "executor"),
    [
        ("2.13.0+cpu", "2.13.0"),
        ("2.11.0", "2.15.0"),
        ("2.15.0+cu132", "2.11.0"),
        ("2.16.0a0+git1", "2.16.1"),
        ("2.10.0", "2.10.0"),
        ("2.13.0", ""),
    ],
)
def test_equal_or_tested_releases_work_together(client, executor):
    assert mismatch(client, executor) == ""


@pytest.mark.parametrize(("client", "executor"), [("2.16.0", "2.15.0"), ("2.13.0+cpu", "2.16.1"), ("2.10.2", "2.11.0")])
def test_mismatch_names_both_releases_and_the_cure(client, executor):
    why = mismatch(client, executor)
    assert f"this client has PyTorch {client}, and the executor has PyTorch {executor}" in why
    there = ".".join(executor.split(".")[:2])
    assert "only from 2.11 to 2.15" in why and f"pip install 'torch=={there}.*'" in why and "on the executor" in why


@pytest.mark.parametrize(
    ("version", "name", "expected"),
    [
        ("2.11.0", "aten._foreach_mm.default", True),
        ("2.12.1", "aten._foreach_mm.default", True),
        ("2.13.0+cpu", "aten._foreach_mm.default", False),
        ("2.13.0", "aten.cholesky.default", False),
        ("2.14.1", "aten.cholesky.default", True),
        ("2.11.0", "aten.add.Tensor", False),
        ("", "aten.cholesky.default", False),
    ],
)
def test_release_lacks_operators_outside_of_their_lifetime(version, name, expected):
    assert lacks(version, name) is expected


def test_listed_operators_are_allowed_and_lived_in_tested_releases():
    assert all(is_allowed(name) for name in LIFETIMES)
    assert all(OLDEST < limit <= NEWEST for limits in LIFETIMES.values() for limit in limits if limit is not None)


@pytest.mark.parametrize(
    ("text", "expected"), [("2.13.0+cpu", (2, 13)), ("3.0", (3, 0)), ("", None), ("git", None), ("2", None)]
)
def test_minor_of_version(text, expected):
    assert minor_of(text) == expected
