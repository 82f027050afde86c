"""Runs one of PyTorch's test files on one side and writes a JSON line per test. `suite.py` starts it and limits its time.

Lines: ``{"test", "start": true}`` before a test; ``{"test", "outcome", "detail"}`` after it, with an outcome of `pass`, `skip`,
`wrong` (a comparison of numbers failed) or `fail`; ``{"end": true, "found"}`` after the last one, with the number of tests from
which a sample is drawn.

On the side "cuda", the process has an executor of its own. If the executor or the session is lost, the process ends in the middle
of its test, which its parent counts as a crash.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import hashlib
import importlib.util
import json
import os
import sys
import traceback
import unittest
import warnings
from pathlib import Path

import shims

#: Beginnings of the messages of `torch.testing.assert_close` about values.
NUMBERS = ("Tensor-likes are not", "Scalars are not", "Booleans mismatch")
LOST = 3
#: Tests of features that Wooly does not have and says so: CUDA's text for elementwise kernels.
UNCLAIMED = "jiterator"
#: Tests whose numbers are not results of operators: they count blocks, segments and events of CUDA's allocator, or expect that a
#: graph overwrites the memory of another one, or that a copy waits for earlier work; or the exact result is beyond their
#: tolerance for some random numbers (`test_sdpa_backwards`, and `test_block_addmm` and `test_EmbeddingBag_...`, whose references
#: round several times), or the CPU's own numbers are (`test_noncontiguous_samples_matmul`, `test_weight_norm_parametrization`),
#: or the operator is one for tests, with another formula for CUDA (`test_view_copy`, `test_autograd_multiple_dispatch_...`).
#: Their comparisons are failures, not wrong numbers.
COUNTS = frozenset(
    {
        "test_allocate_in_thread_to_pool",
        "test_allocator_settings",
        "test_autograd_multiple_dispatch_registrations_cuda",
        *(
            f"test_block_addmm_block_size_{size}_{index}_noncontiguous_{strided}_cuda_{dtype}"
            for size in (2, 3)
            for index in ("int32", "int64")
            for strided in (True, False)
            for dtype in ("float16", "bfloat16")
        ),
        *(
            f"test_EmbeddingBag_per_sample_weights_and_offsets_cuda_{index}_{offset}_float16"
            for index in ("int32", "int64")
            for offset in ("int32", "int64")
        ),
        "test_cuda_graph_allocator_propagates_stream",
        "test_graph_memory_stats_and_use_result_after_destroy_graph",
        "test_graph_three_successive",
        "test_graph_two_successive",
        "test_memory_stats_of_multiple_generators_and_graphs",
        "test_memory_plots_free_segment_stack",
        "test_mempool_multithread",
        "test_noncontiguous_samples_matmul_cuda_float32",
        "test_sdpa_backwards_cuda_float32",
        "test_to_non_blocking",
        "test_view_copy_cuda",
        "test_weight_norm_parametrization_swap_False_cuda",
        "test_weight_norm_parametrization_swap_True_cuda",
    }
)


class Events(unittest.TestResult):
    """Writes the outcome of every test.

    Args:
        out: the stream for the lines.
        alive: whether the executor and the session still answer; called after a failure.
        settle: waits for all operations, and raises their error; called after a test.
    """

    def __init__(self, out, alive, settle):
        super().__init__()
        self._out, self._alive, self._settle = out, alive, settle

    def startTest(self, test):
        super().startTest(test)
        self._outcome, self._detail = "pass", ""
        self.write(test=name_of(test), start=True)

    def stopTest(self, test):
        super().stopTest(test)
        try:
            self._settle()
        except RuntimeError as late:  # of an operation whose result the test did not read
            if self._outcome == "pass":
                self._outcome, self._detail = "fail", f"after the test: {' '.join(str(late).split())}"[:300]
        self.write(test=name_of(test), outcome=self._outcome, detail=self._detail)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        if self._outcome == "pass":
            self._outcome, self._detail = "skip", reason.splitlines()[0][:200] if reason else ""

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self._outcome, self._detail = "fail", "passes, but the test expects a failure"

    def addError(self, test, err):
        super().addError(test, err)
        self._failed(test, err)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._failed(test, err)

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._failed(test, err)

    def _failed(self, test, err):
        kind, error, _ = err
        text = str(error)
        print("".join(traceback.format_exception(*err)), file=sys.stderr, flush=True)
        if not hasattr(test, "_testMethodName") and not hasattr(test, "test_case"):
            return self.write(group=str(test), detail=f"{kind.__name__}: {' '.join(text.split())}"[:300])  # setUpClass
        if self._outcome not in ("wrong", "fail"):
            numbers = issubclass(kind, AssertionError) and text.startswith(NUMBERS)
            numbers = numbers and getattr(test, "_testMethodName", "") not in COUNTS
            self._outcome = "wrong" if numbers else "fail"
            self._detail = f"{kind.__name__}: {' '.join(text.split())}"[:300]
        if not self._alive():
            sys.stderr.flush()
            os._exit(LOST)
        return None

    def write(self, **line):
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()


def name_of(test):
    return f"{type(test).__name__}.{test._testMethodName}"


def tests_of(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from tests_of(test)
        else:
            yield test


def load(path):
    """Import a test file as `__main__` would be, with its folder on the path."""
    source = path.read_text()
    shims.rename(source)
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path)]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    exec(compile(shims.current(source), path, "exec"), module.__dict__)  # noqa: S102  # a test file of PyTorch
    shims.configure()
    return module


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which tests of a file run.

    Attributes:
        keyword: part of their names; * and ? are wildcards.
        every: only each Nth of these.
        sample: the part of these that is drawn at random, 0 to 1.
        seed: names the random sample.
    """

    keyword: str = ""
    every: int = 1
    sample: float = 1.0
    seed: int = 0

    def __str__(self):
        return json.dumps(dataclasses.astuple(self))

    @property
    def arguments(self):
        """This choice on the command line."""
        return [f"--{name}={value}" for name, value in dataclasses.asdict(self).items()]

    def is_meant(self, test):
        """Whether the test has the keyword in its name."""
        return fnmatch.fnmatchcase(test, f"*{self.keyword}*")

    def is_drawn(self, file, test):
        """Whether the test is in the random sample. A larger sample with the same seed contains the smaller one.

        Args:
            file, test: the names of the file, without its folder, and of the test.
        """
        digest = hashlib.sha256(f"{self.seed} {file} {test}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.sample * 2**64


def add_choice(parser):
    """The options of a command line that choose tests."""
    parser.add_argument("-k", "--keyword", default="", help="only tests with this in their name; * and ? are wildcards")
    parser.add_argument("--every", type=int, default=1, help="run only each Nth of these tests")
    parser.add_argument("--sample", type=float, default=1.0, help="run only this part of these tests, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="names the random sample")


def choice_of(options):
    return Choice(options.keyword, options.every, options.sample, options.seed)


def run(path, options, out, alive, settle=lambda: None):
    module, choice = load(path), choice_of(options)
    found = sorted(tests_of(unittest.defaultTestLoader.loadTestsFromModule(module)), key=name_of)
    skipped = set(options.without.read_text().split()) if options.without else set()
    only = set(options.only.read_text().split()) if options.only else None
    chosen = [
        test
        for test in found
        if UNCLAIMED not in name_of(test).lower()
        and (only is None or name_of(test) in only)
        and choice.is_meant(name_of(test))
    ]
    chosen = chosen[:: choice.every]
    found = len(chosen)
    chosen = [test for test in chosen if choice.is_drawn(path.name, name_of(test)) and name_of(test) not in skipped]
    events = Events(out, alive, settle)
    events.write(tests=len(chosen))
    unittest.TestSuite(chosen).run(events)  # a suite, which calls setUpClass and setUpModule
    events.write(end=True, found=found)


def on_device(path, options, out):
    from wooly import api
    from wooly_testkit.executor import executor_process

    # Kernels of scripts run on a CPU by OpenCL, which is a CPU executor's runtime unless another one is named.
    runtime = "opencl" if "triton" in path.read_text().lower() else "torch_cpu"
    with executor_process(runtime=runtime) as running:
        # Some tests start Python processes, which get sessions of their own.
        os.environ["WOOLYAI_EXECUTOR_URL"] = running.endpoints[0].replace("://", f"://{running.token}@", 1)
        os.environ["WOOLYAI_CAPTURE"] = "1"
        api.attach(running.endpoints, running.session_id, running.token)
        api.install_facade()
        shims.install()
        import torch

        def alive():
            with contextlib.suppress(Exception):  # this failure belongs to the test; the next answer counts
                torch.cuda.synchronize()
            try:
                return running.process.poll() is None and torch.ones(2, device="cuda").sum().item() == 2
            except Exception as lost:
                print(f"the session is lost: {lost}", file=sys.stderr)
                return False

        run(path, options, out, alive, torch.cuda.synchronize)
        out.flush()
        running.process.kill()
        os._exit(0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--side", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=int, required=True, help="file descriptor for the lines")
    add_choice(parser)
    parser.add_argument("--only", type=Path, help="file with the names of the tests to run")
    parser.add_argument("--without", type=Path, help="file with the names of tests not to run")
    options = parser.parse_args()
    out = os.fdopen(options.out, "w")
    os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = options.side
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    warnings.simplefilter("default")  # as unittest's runner: tests count warnings
    path = options.path.resolve()
    if options.side == "cuda":
        on_device(path, options, out)
    run(path, options, out, lambda: True)
    out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
