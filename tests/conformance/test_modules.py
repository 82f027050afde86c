"""PyTorch's module database on the device, against the CPU. What differs is in `modules_exceptions.txt`."""

import pytest

pytestmark = pytest.mark.connected
EVERY, FIRST_SAMPLES = 5, 2


def test_every_fifth_module_equals_the_cpu(conformance):
    modules = conformance("modules")
    rows = modules.sweep("--samples", FIRST_SAMPLES, "--dtype", "float32", parts=EVERY)
    assert len({row["op"] for row in rows}) > 20
    modules.assert_none_is_new(rows)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whole_database_equals_the_cpu(conformance, report):
    modules = conformance("modules")
    rows = modules.sweep(workers=2)
    total = report("module database", rows)
    assert total.total() > 2_000
    assert total["crash"] == total["wrong"] == 0
    modules.assert_none_is_new(rows)
    modules.assert_all_listed_fail(rows)
