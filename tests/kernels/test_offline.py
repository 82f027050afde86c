"""What the executor's GPU runtimes launch, built for chips that are not here: checks and all, for each of the well-known kernels.

Nobody runs it here. That the checks leave a kernel's results alone, and keep it from what it was not given, is seen on the
CPU, which runs the text that goes to the GPU.
"""

import re
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
import torch  # noqa: E402
from wooly.device import current  # noqa: E402
from wooly.kernels.launch import ForeignKernel, Pointer  # noqa: E402
from wooly_compiler.build.toolchains import missing  # noqa: E402
from wooly_compiler.build.worker import Limits, WorkerProcess  # noqa: E402
from wooly_compiler.errors import BuildError, ForeignError  # noqa: E402
from wooly_compiler.foreign.ttir import chips  # noqa: E402
from wooly_compiler.foreign.ttir.guard import claims_of, guard  # noqa: E402
from wooly_wis.dtypes import DType  # noqa: E402
from wooly_wis.foreign import UNCHECKED, Source, decode_code  # noqa: E402

from tests.kernels import cuda_kernels  # noqa: E402
from tests.kernels import triton_kernels as kernels  # noqa: E402

TARGETS = ("cuda:sm_90", "hip:gfx942")
NAMES = ("add", "softmax", "matmul", "layer norm", "layer norm's gradient", "dropout", "attention", "grouped gemm")


def captured(name):
    """The text of a launch of one of our kernels."""
    x, ints = torch.ones(64, 64, device="cuda"), torch.tensor([0, 32, 64], dtype=torch.int32, device="cuda")
    w = torch.ones(64, device="cuda")
    locks = torch.zeros(8, dtype=torch.int32, device="cuda")
    square = (x, x, torch.empty_like(x), 64, 64, 64, 64, 1, 64, 1, 64, 1)
    compiled = {
        "add": lambda: kernels.add_kernel[(1,)](x, x, torch.empty_like(x), 64, BLOCK=1024),
        "softmax": lambda: kernels.softmax_kernel[(64,)](torch.empty_like(x), x, 64, 64, BLOCK=64),
        "matmul": lambda: kernels.matmul_kernel.fn.fn[(1,)](*square, BM=64, BN=64, BK=32, EVEN=True),
        "layer norm": lambda: kernels.layer_norm_forward[(64,)](
            x, w, w, torch.empty_like(x), w, w, 64, 64, 1e-5, BLOCK=64
        ),
        "layer norm's gradient": lambda: kernels.layer_norm_backward[(64,)](
            torch.empty_like(x), x, x.clone(), x.clone(), x, w, w, w, locks, 64, 64, GROUPS=4, BLOCK=64
        ),
        "dropout": lambda: kernels.dropout_kernel[(8,)](x, torch.empty_like(x), 4096, 0.5, 7, BLOCK=512),
        "attention": lambda: kernels.attention_kernel[(2, 1)](
            x, x, x, torch.empty_like(x), 0.1, 4096, 64, 64, D=64, BM=32, BN=32, CAUSAL=True
        ),
        "grouped gemm": lambda: kernels.grouped_gemm_kernel[(2,)](
            x, x, torch.empty_like(x), ints, 1, 64, 64, BM=16, BN=32, BK=16
        ),
    }[name]()
    torch.cuda.synchronize()
    return compiled.asm["ttir"].decode()


def signature(text):
    """Entry of a text, and kinds of its arguments."""
    entry, head = re.search(r"tt\.func public @(\w+)\(([^\n]*)\) attributes", text).groups()
    kinds = re.findall(r"%[\w.]+: (?:!tt\.ptr<(\w+)>|(\w+))", head)
    return entry, tuple([f"*{p}" if p else s for p, s in kinds])


def request(text, target, language="ttir", entry="", args=(), block=(1, 1, 1), **options):
    if language == "ttir":
        entry, args = signature(text)
        options = {"num_stages": 3, "num_warps": 4} | options
    made = {"language": language, "text": text, "entry": entry, "args": args, "block": block, "target": target}
    return made | {"what": "foreign", "options": sorted(options.items()), "name": "n"}


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    found = WorkerProcess(Limits(seconds=200), "wooly_compiler.worker", (str(tmp_path_factory.mktemp("worker")),))
    yield found
    found.close()


@pytest.fixture(scope="module")
def build(worker):
    """Builds as an executor has it done."""
    return lambda asked: decode_code(worker.ask(asked, asked["target"], "kernel"), "n")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_triton_kernels_build_with_their_checks(gpu, build, name, target):
    text = captured(name)
    entry, args = signature(text)
    code = build(request(text, target))
    assert code.entry == entry and len(code.parameters) == len(args) and not code.code
    assert any(p.writes for p in code.parameters) and not all(p.writes for p in code.parameters if p.buffer)
    first, last = code.images
    assert max(first.claims) == 16 and set(last.claims) == {1}
    for image in code.images:
        assert image.threads == 4 * (32 if target.startswith("cuda") else 64) and len(image.code) > 1000
        assert image.passed[: len(args)] == tuple(
            [f"{'address' if a.startswith('*') else 'value'} {k}" for k, a in enumerate(args)]
        )
        assert "status" in image.passed and any(p.startswith("length ") for p in image.passed)
        assert not image.scratch and (image.shared or name in ("add", "dropout", "softmax", "layer norm"))


C_CASES = [
    (cuda_kernels.HISTOGRAM, "histogram", ("*u8", "*u8", "i64"), (96, 1, 1), {}),
    (cuda_kernels.REDUCE, "reduce", ("*u8", "*u8", "i64"), (128, 1, 1), {"shared": 512}),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", C_CASES, ids=[c[1] for c in C_CASES])
def test_cuda_c_builds_with_its_checks(build, case, target):
    why = missing(target.partition(":")[0])
    if why:
        pytest.skip(why)
    text, entry, args, block, options = case
    (image,) = build(request(text, target, "cuda-c", entry, args, block, **options)).images
    assert image.passed == ("status", "address 0", "length 0 1", "address 1", "length 1 1", "value 2")
    assert (image.threads, image.claims) == (0, (1, 1, 1)) and len(image.code) > 1000


def test_ptx_is_assembled_for_nvidias_chips_alone(build):
    text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 p, .param .s64 n) { ret; }\n"
    (image,) = build(request(text, "cuda:sm_90", "ptx", "k", ("*u8", "i64"), (64, 1, 1), shared=256)).images
    assert (image.passed, image.threads, image.shared) == (("address 0", "value 1"), 0, 256) and image.code[
        :4
    ] == b"\x7fELF"
    with pytest.raises(BuildError, match="ptx is code for NVIDIA's chips; this device is gfx942"):
        build(request(text, "hip:gfx942", "ptx", "k", ("*u8", "i64")))
    with pytest.raises(BuildError, match="ptxas refuses the text"):
        build(request(text.replace("ret;", "rot;"), "cuda:sm_90", "ptx", "k", ("*u8", "i64")))


# -- texts ---------------------------------------------------------------------------------------------------------------

KERNEL = """module {
  tt.func public @k(%x: !tt.ptr<f32> {tt.divisibility = 16 : i32}, %n: i32) attributes {noinline = false} {
BODY
    tt.return
  }
}
"""
ASSEMBLY = '"%s" {constraints = "=r,r", packed_element = 1 : i32, pure = false}'
WIDE = "    %r = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32>\n"


def build_body(build, body, **options):
    return build(request(KERNEL.replace("BODY", body), "cuda:sm_90", **options))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            f"    %a = tt.elementwise_inline_asm {ASSEMBLY % 'trap;'} %n : i32 -> i32",
            "tt.elementwise_inline_asm .* cannot be checked on a GPU .*assembly",
        ),
        (
            '    %a = tt.extern_elementwise %n {libname = "", libpath = "/lib/x.bc", pure = false, symbol = "vprintf"} : '
            "(i32) -> i32\n"
            "    %c = arith.sitofp %a : i32 to f32\n    tt.store %x, %c : !tt.ptr<f32>",
            "extern_elementwise is not written as it should be",
        ),
        ("    %a = tt.nothing %n : i32", "cannot read the text"),
        ("    llvm.intr.assume %n : i32", "cannot read the text"),
    ],
)
def test_text_that_cannot_be_checked_is_refused(build, body, says):
    with pytest.raises(BuildError, match=says):
        build_body(build, body)


def test_text_without_checks_is_built_where_its_launch_says_so(build):
    body = f"    %a = tt.elementwise_inline_asm {ASSEMBLY % 'mov.u32 $0, $1;'} %n : i32 -> i32\n"
    body += "    %c = arith.sitofp %a : i32 to f32\n    tt.store %x, %c : !tt.ptr<f32>"
    (image,) = build_body(build, body, **{UNCHECKED: True}).images
    assert image.passed[:2] == ("address 0", "value 1") and "status" not in image.passed
    assert image.claims == (16, 1)


def guarded(text, claims=None):
    chip = chips.chip("cuda:sm_90")
    compiler = chips.Compiler(chip, {"num_warps": 4})
    plain = compiler.plain(text)
    entry, args = signature(plain)
    made = guard(plain, entry, args, claims or (1,) * len(args), 128)
    compiler.read(made.text)
    return made


def test_every_access_has_a_guard_and_no_claim_stays():
    body = WIDE + (
        "    %m = arith.muli %n, %n {tt.divisibility = dense<16> : tensor<1xi32>} : i32\n"
        "    %s = tt.splat %m : i32 -> tensor<64xi32>\n    %i = arith.addi %s, %r overflow<nsw> : tensor<64xi32>\n"
        "    %q = arith.divsi %i, %s : tensor<64xi32>\n"
        "    %p = tt.splat %x : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>\n"
        "    %a = tt.addptr %p, %q : tensor<64x!tt.ptr<f32>>, tensor<64xi32>\n"
        "    %v = tt.load %a : tensor<64x!tt.ptr<f32>>\n    tt.store %a, %v : tensor<64x!tt.ptr<f32>>"
    )
    made = guarded(KERNEL.replace("BODY", body))
    assert "nsw" not in made.text and "divisibility = 16" in made.text.splitlines()[1]  # the status words' own
    assert made.text.count("divisibility") == 1
    assert made.text.count("arith.cmpi ult") == 2 and made.extra == ((0, 4),) and made.writes == (True, False)
    assert re.search(r"arith\.select %w\d+, %w\d+, %\w+ : tensor<64xi1>, tensor<64xi32>\n[^\n]*arith\.divsi", made.text)
    assert [p.split(" ")[0] for p in made.places] == ["tt.load", "tt.store"]


def test_claims_of_arguments_are_powers_of_two():
    head = (
        "tt.func public @k(%x: !tt.ptr<f32> {tt.divisibility = 48 : i32}, %n: i32, "
        "%m: i32 {tt.divisibility = 0 : i32}) attributes"
    )
    assert claims_of(head, 3) == (16, 1, 1)
    assert claims_of(head, 2) == (1, 1)


def test_pointers_of_other_origin_are_held_against_where_buffers_are():
    body = (
        "    %a = tt.ptr_to_int %x : !tt.ptr<f32> -> i64\n    %w = arith.extsi %n : i32 to i64\n"
        "    %b = arith.addi %a, %w : i64\n    %p = tt.int_to_ptr %b : i64 -> !tt.ptr<f32>\n"
        "    %v = tt.load %p : !tt.ptr<f32>\n    tt.store %x, %v : !tt.ptr<f32>"
    )
    made = guarded(KERNEL.replace("BODY", body))
    assert made.extra == ((0, 1), (0, 4))
    assert "arith.cmpi eq" in made.text  # whole elements, too


def test_loops_can_be_ended():
    body = """    %zero = arith.constant 0.0 : f32
    scf.while : () -> () {
      %v = tt.load %x {isVolatile = true} : !tt.ptr<f32>
      %c = arith.cmpf oeq, %v, %zero : f32
      scf.condition(%c)
    } do {
      %c0 = arith.constant 0 : i32
      %c1 = arith.constant 1 : i32
      scf.for %i = %c0 to %n step %c1  : i32 {
        tt.store %x, %zero : !tt.ptr<f32>
      }
      scf.yield
    }"""
    made = guarded(KERNEL.replace("BODY", body))
    assert made.text.count("tt.atomic_rmw or, relaxed, gpu, %ws") == 2
    condition = re.search(r"(%w\d+) = arith\.andi %\w+, %w\d+ : i1\n\s*scf\.condition\(\1\)", made.text)
    assert condition and re.search(r"scf\.for %\w+ = %\w+ to %w\d+ step", made.text)


def test_a_text_of_several_functions_is_refused():
    two = KERNEL.replace("BODY", "").replace("module {\n", "module {\n  tt.func private @f() {\n    tt.return\n  }\n")
    with pytest.raises(ForeignError, match="not that of k alone"):
        guard(two, "k", ("*f32", "i32"), (1, 1), 128)


# -- the same texts, run here ------------------------------------------------------------------------------------------

_DTYPE = {"f32": DType.F32, "i32": DType.I32, "i64": DType.I64}


def run_guarded(text, grid, values, lengths=None):
    """Run a text with guards as a CPU runs any, with what a GPU's launch would be given; the status words."""
    made = guarded(text)
    entry, args = signature(made.text)
    status = torch.zeros(8, dtype=torch.int32, device="cuda")
    given = [*values]
    for k, unit in made.extra:
        given.append((lengths or {}).get(k, values[k].nbytes) // unit)
    parameters = [Pointer(_DTYPE[a[1:]], writes=True) if a.startswith("*") else _DTYPE[a] for a in args]
    kernel = ForeignKernel(Source("ttir", made.text), entry, tuple(parameters), (1, 1, 1), ())
    current().launches.launch(kernel, grid, [*given, status])
    return status.tolist(), made.places


def operands(name):
    """What a kernel is launched on, and its grid."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    w, b = torch.randn(64, device="cuda"), torch.randn(64, device="cuda")
    out, mean, rstd = torch.zeros(64, 64, device="cuda"), torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    ints = torch.tensor([0, 32, 64], dtype=torch.int32, device="cuda")
    return {
        "add": ((1, 1, 1), (x, y, out, 64), out),
        "softmax": ((64, 1, 1), (out, x, 64, 64), out),
        "matmul": ((1, 1, 1), (x, y, out, 64, 64, 64, 64, 64, 64), out),
        "layer norm": ((64, 1, 1), (x, w, b, out, mean, rstd, 64, 64, 1e-5), out),
        "dropout": ((8, 1, 1), (x, out, 4096, 0.5, 7), out),
        "attention": ((2, 1, 1), (x, y, x, out, 0.1, 4096, 64, 64), out),
        "grouped gemm": ((2, 1, 1), (x, y, out, ints, 64, 64), out),
    }[name]


@pytest.mark.parametrize("name", ["add", "softmax", "matmul", "layer norm", "dropout", "attention", "grouped gemm"])
@pytest.mark.slow
def test_guards_leave_results_alone_and_keep_what_is_beyond(gpu, name):
    text = captured(name)
    grid, values, out = operands(name)
    entry, args = signature(text)
    parameters = [Pointer(_DTYPE[a[1:]], writes=True) if a.startswith("*") else _DTYPE[a] for a in args]
    plain = ForeignKernel(Source("ttir", text), entry, tuple(parameters), (1, 1, 1), ())
    current().launches.launch(plain, grid, list(values))
    wanted = out.clone()
    assert wanted.any()
    out.zero_()
    status, _ = run_guarded(text, grid, values)
    assert torch.equal(out, wanted) and status[1] == 0
    out.zero_()
    (k,) = [k for k, v in enumerate(values) if v is out]
    status, places = run_guarded(text, grid, values, {k: 33 * 4})  # of the result, 33 elements are its own
    assert torch.equal(out.view(-1)[:33], wanted.view(-1)[:33]) and not out.view(-1)[33:].any()
    assert status[1] & 7 == 2 and places[status[1] >> 3].startswith("tt.store in line")


def test_kernels_are_where_the_check_of_a_gpu_looks_for_them():
    script = Path(__file__).parents[1] / "gpu" / "run.sh"
    assert "PYTHONPATH=tests/kernels" in script.read_text()
