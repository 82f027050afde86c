"""Block tables of vLLM's model runner V2: what is written comes back, and blocks that a sliding window has left are zeros."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.connected, pytest.mark.timeout(600)]
LONG, SHORT = list(range(1, 3001)), list(range(5001, 5008))


def test_rows_are_gathered_as_they_were_written(stack):
    found = stack.printed("table_cases.py")
    # Computed tokens of the long row: 11. The window reaches 4 back, so 7 tokens, three blocks of two, were left.
    left, short = ([0] * 3, [0] * 2) if found["windows"] else (LONG[:3], SHORT[:2])
    whole, masked = found["first"]
    assert whole[0] == LONG and whole[1][:7] == SHORT and not any(whole[2])
    assert masked[0] == left + LONG[3:] and masked[1][:7] == short + SHORT[2:] and not any(masked[2])
    assert found["second"] == [[SHORT], [short + SHORT[2:]]]
    if found["windows"]:  # the rows of the larger step before are cleared
        assert found["beyond"] == [[0] * 4] * 2
