"""The runner of PyTorch's tests, on small test files of our own."""

import io
import json
import sys
import unittest
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import one_file
import suite

SMALL = """
import os, time, unittest

class TestSmall(unittest.TestCase):
    def test_a_passes(self): pass
    def test_b_fails(self): self.fail("Tensor-likes are not close!")
    def test_c_crashes(self): os._exit(9)
    def test_d_hangs(self): time.sleep(600)
    def test_e_skips(self): self.skipTest("why")
    def test_f_raises(self): raise OSError("gone")
"""


def test_rows_of_file_with_every_outcome_classifies_and_goes_on(tmp_path):
    path = tmp_path / "test_small.py"
    path.write_text(SMALL)
    rows, found = suite.rows_of(path, "cpu", limit=5.0)
    assert found == 6
    assert {test.removeprefix("TestSmall.test_")[0]: outcome for test, (outcome, _) in rows.items()} == {
        "a": "pass",
        "b": "wrong",
        "c": "crash",
        "d": "hang",
        "e": "skip",
        "f": "fail",
    }


@pytest.mark.slow
def test_rows_of_every_second_test_go_on_after_a_crash(tmp_path):
    path = tmp_path / "test_small.py"
    path.write_text(SMALL)
    rows, _ = suite.rows_of(path, "cpu", suite.Choice("test_[b-f]_*", every=2), limit=5.0)
    assert {test.removeprefix("TestSmall.test_")[0]: outcome for test, (outcome, _) in rows.items()} == {
        "b": "wrong",
        "d": "hang",
        "f": "fail",
    }


def test_outcomes_of_a_killed_run_are_taken_over(tmp_path):
    path, kept = tmp_path / "test_small.py", tmp_path / "outcomes.jsonl"
    path.write_text(
        "import unittest\n\nclass TestSmall(unittest.TestCase):\n    def test_a(self): self.fail('again')\n"
    )
    suite.Outcomes(kept).keep("test_small.py", "cpu", "TestSmall.test_a", "pass", "")
    with kept.open("a") as file:
        file.write('{"file": "test_small.py", "si')
    known = suite.Outcomes(kept).of("test_small.py", "cpu")
    assert suite.Outcomes(kept).of("test_small.py", "cuda") == {}
    assert suite.rows_of(path, "cpu", known=known) == ({"TestSmall.test_a": ("pass", "")}, 1)


def test_rows_of_file_that_does_not_load_is_a_crash_of_the_file(tmp_path):
    path = tmp_path / "test_broken.py"
    path.write_text("import no_such_module")
    assert suite.rows_of(path, "cpu")[0][""][0] == "crash"


def test_twin_of_device_test_is_its_name_on_the_cpu():
    assert suite.twin("TestXCUDA.test_cudalike_cuda_float32") == "TestXCPU.test_cudalike_cpu_float32"
    assert suite.twin("TestPlain.test_y") == "TestPlain.test_y"


@pytest.mark.slow
def test_file_that_does_not_load_on_either_side_does_not_fail_alone(tmp_path):
    path = tmp_path / "test_broken.py"
    path.write_text("import no_such_module")
    row = suite.check(path, set(), suite.ALL, 60.0, tmp_path, suite.Outcomes())
    assert (row["both"], row["crash"], row["alone"]) == (1, 0, {})


def test_alone_leaves_out_what_fails_on_the_cpu_too():
    device = {
        "TCUDA.test_a_cuda": ("fail", "x"),
        "TCUDA.test_b_cuda": ("fail", "y"),
        "TCUDA.test_c_cuda": ("wrong", "z"),
    }
    host = {"TCPU.test_a_cpu": ("fail", "x"), "TCPU.test_b_cpu": ("pass", "")}
    assert set(suite.alone(device, host)) == {"TCUDA.test_b_cuda", "TCUDA.test_c_cuda"}


@pytest.mark.slow
def test_file_that_loads_on_neither_side_does_not_fail_alone(tmp_path):
    path = tmp_path / "test_old.py"
    path.write_text("import no_such_module")
    row = suite.check(path, set(), suite.ALL, 5.0, tmp_path, suite.Outcomes())
    assert (row["both"], row["crash"], row["alone"]) == (1, 0, {})


def test_judge_names_unlisted_failures_and_lines_that_pass():
    device = {"T.a": ("fail", "x"), "T.b": ("pass", ""), "T.c": ("fail", "y")}
    failing = {"T.a": ("fail", "x"), "T.c": ("fail", "y")}
    known = {("f.py", "T.b", "fail"), ("f.py", "T.c", "fail"), ("f.py", "T.not_run", "fail"), ("g.py", "T.b", "fail")}
    new, passing = suite.judge("f.py", device, failing, known)
    assert set(new) == {"T.a"}
    assert passing == {("f.py", "T.b", "fail")}


def test_line_of_a_family_lists_all_its_tests_and_is_kept_if_some_pass():
    device = {
        "T.test_a_x": ("fail", ""),
        "T.test_a_y": ("pass", ""),
        "T.test_b_x": ("fail", ""),
        "T.test_a_z": ("wrong", ""),
    }
    failing = {test: found for test, found in device.items() if found[0] != "pass"}
    new, passing = suite.judge(
        "f.py", device, failing, {("f.py", "T.test_a_*", "fail"), ("g.py", "T.test_b_*", "fail")}
    )
    assert set(new) == {"T.test_b_x", "T.test_a_z"}
    assert not passing


def test_listed_line_without_reason_is_refused(tmp_path):
    path = tmp_path / "exceptions.txt"
    path.write_text("f.py T.a fail:\n")
    with pytest.raises(ValueError, match=r"is not `file class.test outcome: reason`"):
        suite.listed(path)


def test_exceptions_list_has_reasons_and_no_wrong_numbers_crashes_or_hangs():
    assert {outcome for _, _, outcome in suite.listed(suite.LISTED)} <= {"fail"}


def test_samples_with_the_same_seed_contain_each_other_and_have_their_size():
    names = [f"T.test_{i}" for i in range(10_000)]

    def drawn(part, seed):
        return {name for name in names if suite.Choice(sample=part, seed=seed).is_drawn("test_x.py", name)}

    small, large = drawn(0.01, 7), drawn(0.1, 7)
    assert small < large
    assert 60 < len(small) < 140
    assert 900 < len(large) < 1100
    assert len(drawn(0.1, 8) & large) < 200
    assert drawn(1.0, 7) == set(names)
    assert drawn(0.0, 7) == set()


@pytest.mark.slow  # the tests of samples and of outcomes that are taken over have its parts
def test_check_of_a_sample_runs_only_what_has_no_outcome_and_nothing_when_complete(tmp_path):
    path, kept, marks = tmp_path / "test_small.py", tmp_path / "outcomes.jsonl", tmp_path / "marks"
    bodies = "".join([f"    def test_{i}(self): open({str(marks)!r}, 'a').write('{i} ')\n" for i in range(40)])
    path.write_text(f"import unittest\n\nclass TestSmall(unittest.TestCase):\n{bodies}")
    half, all_of_it = suite.Choice(sample=0.5, seed=3), suite.Choice(seed=3)
    drawn = {f"{i}" for i in range(40) if half.is_drawn("test_small.py", f"TestSmall.test_{i}")}
    outcomes = suite.Outcomes(kept)
    rows, found = suite.rows_of(path, "cpu", half, progress=lambda *o: outcomes.keep("test_small.py", "cuda", *o))
    assert (len(rows), found) == (len(drawn), 40)
    assert set(marks.read_text().split()) == drawn
    outcomes.complete("test_small.py", "cuda", str(half), found)

    row = suite.check(path, set(), half, 5.0, tmp_path, suite.Outcomes(kept))
    assert (row["pass"], row["tests"]) == (len(drawn), 40)
    assert set(marks.read_text().split()) == drawn
    known = suite.Outcomes(kept).of("test_small.py", "cuda")
    rows, _ = suite.rows_of(path, "cpu", all_of_it, known=known)
    assert sorted(marks.read_text().split(), key=int) == [f"{i}" for i in range(40)]


def test_summary_counts_tests_that_pass_of_those_that_could():
    row = {"file": "f.py", "tests": 50, "pass": 9, "skip": 5, "both": 2, "wrong": 0, "fail": 1, "crash": 0, "hang": 0}
    total = suite.summary(
        [{**row, "alone": {"T.a": ["fail", "x"]}, "new": []}, {**row, "alone": {"T.b": []}, "new": ["T.b"]}]
    )
    assert (total["files"], total["pass"], total["fail"], total["listed"], total["tests"]) == (2, 18, 2, 1, 100)
    part, low, high = total["rate"]
    assert part == 0.9
    assert 0.69 < low < 0.71
    assert 0.97 < high < 0.98
    assert "18 of 20 tests pass on the device: 90.00 %" in suite.described(total).replace("%", " %")
    assert suite.summary([])["rate"] is None


def test_error_of_an_operation_whose_result_a_test_does_not_read_fails_that_test():
    lines, errors = io.StringIO(), [RuntimeError("index 9 is out of\nbounds"), None]

    class TestSmall(unittest.TestCase):
        def test_a(self):
            pass

        def test_b(self):
            pass

    def settle():
        if error := errors.pop(0):
            raise error

    events = one_file.Events(lines, lambda: True, settle)
    unittest.TestSuite([TestSmall("test_a"), TestSmall("test_b")]).run(events)
    ended = [line for line in map(json.loads, lines.getvalue().splitlines()) if "outcome" in line]
    assert [(line["outcome"], line["detail"]) for line in ended] == [
        ("fail", "after the test: index 9 is out of bounds"),
        ("pass", ""),
    ]
