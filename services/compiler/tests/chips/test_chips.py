"""Every text for GPUs builds with the vendors' compilers, and spills no register. No GPU is needed; nothing runs here.

The quick test builds a sample. `make test-all` builds all texts for all chips and compares the numbers with the page.
"""

import importlib.metadata
import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from wooly_compiler.artifacts import plan_of
from wooly_compiler.build.toolchains import missing
from wooly_compiler.errors import BuildError
from wooly_testkit.effort import examples, sampled
from wooly_wis.artifact import decided_values, deciding_params

from services.compiler.tests.chips import table
from services.compiler.tests.chips.texts import Text, kernels_of, printed, texts
from services.compiler.tests.chips.usage import Usage, of_code, of_messages, usages
from services.compiler.tests.test_plans import tapes

ALL = bool(os.environ.get("WOOLY_THOROUGH"))


def need(toolchain):
    """Skip the test if a compiler is missing; fail in `make test-all`, which promises all builds."""
    why = missing(toolchain)
    if why and ALL:
        remedy = "make setup" if toolchain == "cuda" else "make amd-compiler"
        pytest.fail(f"make test-all builds for all chips, but {why}. Here it is: {remedy}")
    if why:
        pytest.skip(why)


def same_compilers():
    """Whether this machine has the compilers of the page."""
    return f"Compilers: {table.made_by()};" in table.PAGE.read_text()


def allowed():
    """The texts that may spill, with the amounts."""
    lines = [line.rpartition(": ") for line in table.SPILLS.read_text().splitlines()]
    return {name: int(amount) for name, _, amount in lines}


def too_many(target, found):
    """Texts that spill more than the list allows."""
    may = allowed() if same_compilers() else {}
    named = [(f"{target} / {t.group} / {t.name}", t.group, u.spilled) for t, u in found]
    # Of another version of the compilers only the generated kernels are known not to spill.
    return [n for n, group, amount in named if amount > may.get(n, 0) and (may or group in ("programs", "rows"))]


@pytest.mark.parametrize("target", ("cuda:sm_90", "hip:gfx942"))
def test_sample_of_texts_builds_without_spills(target):
    toolchain = target.partition(":")[0]
    need(toolchain)
    every = {f"{t.group} / {t.name}": t for t in texts(toolchain) if t.name != "everything"}
    sample = [every[name] for name in sampled(every, 100, lambda name: (every[name].group,))]
    assert not too_many(target, [(t, table.worst(usages(t, target))) for t in sample])


@pytest.mark.slow
@pytest.mark.timeout(900)  # clang needs two minutes for a target, and a busy machine three times as long
@pytest.mark.parametrize("target", table.TARGETS)
def test_all_texts_build_and_need_what_the_page_says(target):
    need(target.partition(":")[0])
    found = table.measured(target)
    assert not too_many(target, found)
    if not same_compilers():
        pytest.skip(f"the page has numbers of other compilers than {table.made_by()}")
    remedy = "the numbers changed: run make kernel-table and read the difference"
    page = table.PAGE.read_text()
    assert table.summary(target, found) in page, remedy
    assert [s for s in table.SPILLS.read_text().splitlines() if s.startswith(target)] == table.spills(target, found), (
        "fewer texts spill: run make kernel-table"
    )
    if target == table.LISTED:
        assert table.lists(found, table.unguarded(found)) in page, remedy


@given(tapes())
@settings(
    max_examples=examples(4, 200),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
def test_kernels_of_random_programs_do_not_spill(made):
    need("cuda")
    for kernel in kernels_of(made[0]):
        (found,) = usages(Text("programs", kernel.name, "cuda", printed(kernel, "cuda")), "cuda:sm_90")
        assert not found.spilled, kernel.name


@pytest.mark.slow
@pytest.mark.parametrize("target", ("cuda:sm_90", "hip:gfx942"))
def test_kernels_of_models_do_not_spill(target, model_programs):
    """Kernels of whole models, as an executor on this chip asks for them."""
    toolchain = target.partition(":")[0]
    need(toolchain)
    known = set()
    for program, words in model_programs:
        decided = [(k, words[8 * k : 8 * k + 8]) for k in deciding_params(program)]
        for kernel in plan_of(program, target, "full", decided_values(program, decided)).kernels:
            text = printed(kernel, toolchain)
            if text not in known:
                known.add(text)
                (found,) = usages(Text("programs", kernel.name, toolchain, text), target)
                assert not found.spilled, kernel.name
    assert len(known) > 50


@pytest.fixture(scope="module")
def model_programs(cuda):
    """The programs of the benchmark's models, each with the params of one run."""
    from wooly.device import current

    from bench import coverage

    recorder = current().recorder
    with recorder.lock:
        recorder._sent.clear()  # a program that an earlier test of this process has sent would not be sent again
    capture = coverage.Capture()
    for name in coverage.MODELS:
        coverage.captured(name, capture)
    return [(capture.programs[d], words) for d, words in capture.params.items()]


def test_build_of_wrong_text_raises():
    need("cuda")
    with pytest.raises(BuildError, match="undeclared"):
        usages(Text("rows", "wrong", "cuda", "__global__ void k(undeclared x) {}"), "cuda:sm_90")


def test_report_of_spills_is_read():
    """A kernel with more values than registers spills."""
    need("cuda")
    body = "".join(f"float v{k} = x[{k} * n];" for k in range(400)) + "__syncthreads();"
    body += "".join(f"x[{k}] = v{k} * v{(k * 7) % 400};" for k in range(400))
    text = f'extern "C" __global__ void __launch_bounds__(1024) k(float* x, int n) {{ {body} }}'
    (found,) = usages(Text("rows", "large", "cuda", text), "cuda:sm_90")
    assert found.registers == 64 and found.spilled > 1000 and found.stack > 500


def test_messages_and_metadata_of_kernels_are_read():
    said = (
        "Compiling entry function 'k' for 'sm_90'\n 8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads\n"
    )
    assert of_messages(said + "Used 40 registers, used 1 barriers, 1024 bytes smem\n") == [Usage(40, 16, 8, 1024)]
    numbers = {".group_segment_fixed_size": b"\xcd\x04\x00", ".private_segment_fixed_size": b"\x08"}
    numbers |= {".sgpr_spill_count": b"\x01", ".vgpr_count": b"\xcc\x80", ".vgpr_spill_count": b"\x02"}
    code = b"".join(bytes([0xA0 + len(k)]) + k.encode() + v for k, v in numbers.items())
    assert of_code(code) == Usage(128, 3, 8, 1024)
    with pytest.raises(AssertionError, match=r"has no \.vgpr_count"):
        of_code(b"")


def test_page_and_list_of_spills_agree():
    for line in table.SPILLS.read_text().splitlines():
        target, group, _ = line.split(" / ", 2)
        assert target in table.TARGETS and group in ("cuda-c", "triton"), "a generated kernel must not spill"
    assert importlib.metadata.version("triton") in table.PAGE.read_text()
