"""PyTorch's complete operator database on the device, compared with the CPU. `opinfo_exceptions.txt` lists the differences."""

import pytest

pytestmark = pytest.mark.connected
#: Outcomes that no list may contain.
INEXCUSABLE = ("crash", "wrong")


def test_exceptions_list_has_no_crashes_or_wrong_numbers(conformance):
    assert [line for line in conformance("opinfo").listed() if line[3] in INEXCUSABLE] == []


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_database_equals_cpu_except_listed(conformance, report):
    """A quarter of an hour on two cores. 99.92 % pass with the CPU's bits, strides and errors. No result is merely close."""
    opinfo = conformance("opinfo")
    rows = opinfo.sweep(workers=2)
    total = report("operator database", rows)
    assert total.total() > 300_000
    assert [total[outcome] for outcome in INEXCUSABLE] == [0, 0]
    assert [total[outcome] for outcome in ("close", "layout")] == [0, 0]
    # Share of all samples that apply. Samples that vary on the CPU itself (LAPACK's least squares) count as not passed.
    assert total["pass"] >= 0.999 * (total.total() - total["skip"])
    opinfo.assert_none_is_new(rows)
    opinfo.assert_all_listed_fail(rows)
