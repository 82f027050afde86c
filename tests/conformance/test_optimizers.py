"""PyTorch's complete optimizer database on the device, compared with the CPU.

`optimizers_exceptions.txt` lists the differences.
"""

import pytest

pytestmark = pytest.mark.connected


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_database_equals_cpu_except_listed(conformance, report):
    optimizers = conformance("optimizers")
    rows = optimizers.sweep(workers=2)
    total = report("optimizer database", rows)
    assert total.total() > 800
    assert total["crash"] == total["wrong"] == 0
    optimizers.assert_none_is_new(rows)
    optimizers.assert_all_listed_fail(rows)
