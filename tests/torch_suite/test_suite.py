"""The runner of PyTorch's tests, on small test files of our own."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
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
    rows = suite.rows_of(path, "cpu", limit=5.0)
    assert {test.removeprefix("TestSmall.test_")[0]: outcome for test, (outcome, _) in rows.items()} == {
        "a": "pass",
        "b": "wrong",
        "c": "crash",
        "d": "hang",
        "e": "skip",
        "f": "fail",
    }


def test_rows_of_every_second_test_go_on_after_a_crash(tmp_path):
    path = tmp_path / "test_small.py"
    path.write_text(SMALL)
    rows = suite.rows_of(path, "cpu", keyword="test_[b-f]_*", every=2, limit=5.0)
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
    assert suite.rows_of(path, "cpu", known=known) == {"TestSmall.test_a": ("pass", "")}


def test_rows_of_file_that_does_not_load_is_a_crash_of_the_file(tmp_path):
    path = tmp_path / "test_broken.py"
    path.write_text("import no_such_module")
    assert suite.rows_of(path, "cpu")[""][0] == "crash"


def test_twin_of_device_test_is_its_name_on_the_cpu():
    assert suite.twin("TestXCUDA.test_cudalike_cuda_float32") == "TestXCPU.test_cudalike_cpu_float32"
    assert suite.twin("TestPlain.test_y") == "TestPlain.test_y"


def test_alone_leaves_out_what_fails_on_the_cpu_too():
    device = {
        "TCUDA.test_a_cuda": ("fail", "x"),
        "TCUDA.test_b_cuda": ("fail", "y"),
        "TCUDA.test_c_cuda": ("wrong", "z"),
    }
    host = {"TCPU.test_a_cpu": ("fail", "x"), "TCPU.test_b_cpu": ("pass", "")}
    assert set(suite.alone(device, host)) == {"TCUDA.test_b_cuda", "TCUDA.test_c_cuda"}


def test_judge_names_unlisted_failures_and_lines_that_pass():
    device = {"T.a": ("fail", "x"), "T.b": ("pass", ""), "T.c": ("fail", "y")}
    failing = {"T.a": ("fail", "x"), "T.c": ("fail", "y")}
    known = {("f.py", "T.b", "fail"), ("f.py", "T.c", "fail"), ("f.py", "T.not_run", "fail"), ("g.py", "T.b", "fail")}
    new, passing = suite.judge("f.py", device, failing, known)
    assert set(new) == {"T.a"}
    assert passing == {("f.py", "T.b", "fail")}


def test_listed_line_without_reason_is_refused(tmp_path):
    path = tmp_path / "exceptions.txt"
    path.write_text("f.py T.a fail:\n")
    with pytest.raises(ValueError, match=r"is not `file class.test outcome: reason`"):
        suite.listed(path)


def test_exceptions_list_has_reasons_and_no_wrong_numbers_crashes_or_hangs():
    assert {outcome for _, _, outcome in suite.listed(suite.LISTED)} <= {"fail"}
