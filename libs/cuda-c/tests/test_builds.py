"""The same kernels for GPUs: they build with the same checks, for chips that this machine may lack. They do not run here.

One kernel calls every function that the reference page names.
"""

import pytest
from wooly_compiler.build.targets import target
from wooly_compiler.build.toolchains import missing
from wooly_compiler.build.worker import BuildWorker, Limits, WorkerProcess
from wooly_compiler.render.source import Source
from wooly_cuda_c.printing.dialects import DIALECTS
from wooly_cuda_c.printing.translate import translate
from wooly_testkit.effort import sampled
from wooly_wis.foreign import decode_code

from services.compiler.tests.chips.texts import CUDA_C
from services.compiler.tests.kernels import cuda_kernels as kernels

CASES = [*CUDA_C, (kernels.every_function(), "everything", ("buffer",) * 6, (64, 1, 1), "")]


@pytest.fixture(scope="module")
def worker():
    with BuildWorker(Limits(seconds=100)) as found:
        yield found


#: PoCL's builds are slow (`test_cuda_c` builds and runs its kernels), and those of all functions for NVIDIA. Of the others, the
#: quick suite has each kernel and each target.
QUICK = sampled(
    [f"{case[1]}-{name}" for case in CASES for name in ("cuda:sm_90", "hip:gfx942") if case[1] != "everything"],
    8,
    lambda what: what.split("-"),
) | {"everything-hip:gfx942"}


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, id=(i := f"{case[1]}-{name}"), marks=() if i in QUICK else pytest.mark.slow)
        for case in CASES
        for name in ("opencl:cpu", "cuda:sm_90", "hip:gfx942")
    ],
)
def test_kernel_builds_for_every_dialect(name, case, worker):
    where = target(name)
    why = missing(where.toolchain)
    if why:
        pytest.skip(why)
    text, entry, arguments, block, template = case
    if where.toolchain == "hip" and entry == "everything":
        text = kernels.every_function(
            vendors=False
        )  # AMD's functions are in a library that only the device's machine has
    made = translate(text, entry, arguments, block, template=template, shared=512, dialect=DIALECTS[where.toolchain])
    source = Source(made.entry, where.dialect.name, made.text, 1, block[0] * block[1] * block[2])
    assert len(worker.build(source, where)) > 1000


@pytest.mark.parametrize("dialect", DIALECTS)
def test_translate_of_every_function_succeeds(dialect):
    text, entry, arguments, block, _ = CASES[-1]
    made = translate(text, entry, arguments, block, template="", shared=512, dialect=DIALECTS[dialect])
    assert made.entry in made.text and len(made.text) > len(text) / 2


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """Builds as the compiler service does for an executor."""
    arguments = (str(tmp_path_factory.mktemp("worker")),)
    found = WorkerProcess(Limits(seconds=200), "wooly_compiler.worker", arguments)

    def ask(text, entry, args, block, options, target):
        asked = {"language": "cuda-c", "text": text, "entry": entry, "args": args, "block": block, "target": target}
        asked |= {"what": "foreign", "options": sorted(options.items()), "name": "n"}
        return decode_code(found.ask(asked, target, "kernel"), "n")

    yield ask
    found.close()


C_CASES = [
    (kernels.HISTOGRAM, "histogram", ("*u8", "*u8", "i64"), (96, 1, 1), {}),
    (kernels.REDUCE, "reduce", ("*u8", "*u8", "i64"), (128, 1, 1), {"shared": 512}),
]


@pytest.mark.parametrize("target", ("cuda:sm_90", "hip:gfx942"))
@pytest.mark.parametrize("case", C_CASES, ids=[c[1] for c in C_CASES])
def test_worker_builds_a_kernel_with_its_checks(code, case, target):
    why = missing(target.partition(":")[0])
    if why:
        pytest.skip(why)
    text, entry, args, block, options = case
    (image,) = code(text, entry, args, block, options, target).images
    assert image.passed == ("status", "address 0", "length 0 1", "address 1", "length 1 1", "value 2")
    assert (image.threads, image.claims) == (0, (1, 1, 1)) and len(image.code) > 1000
