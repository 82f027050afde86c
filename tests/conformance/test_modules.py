"""PyTorch's complete module database on the device, compared with the CPU. `modules_exceptions.txt` lists the differences."""

import pytest

pytestmark = pytest.mark.connected


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_database_equals_cpu_except_listed(conformance, report):
    modules = conformance("modules")
    rows = modules.sweep(workers=2)
    total = report("module database", rows)
    assert total.total() > 2_000
    assert total["crash"] == total["wrong"] == 0
    modules.assert_none_is_new(rows)
    modules.assert_all_listed_fail(rows)
