"""Foreign kernels on the GPU runtime: arguments of a launch, choice of the code, reports of violations, time limits.

They run on the fake driver, whose kernels are Python functions. The compiler's `tests/kernels` test the
output of the vendors' compilers.
"""

import ctypes
import struct

import pytest
from wooly_bus.worker import WorkerError
from wooly_executor.errors import OperationError
from wooly_executor.runtime.gpu_kernels import fits
from wooly_wis.codec import digest
from wooly_wis.dtypes import DType
from wooly_wis.foreign import (
    UNCHECKED,
    ForeignCode,
    Image,
    Launch,
    Parameter,
    Source,
    encode_code,
    encode_source,
)
from wooly_wis.frames import Kind
from wooly_wis.program import Form, Operand, ParamKind, ParamRef, Role, View

from services.executor.tests.fake_gpu import FakeDriver, Function, gpu_runtime

F32, I32, I64 = DType.F32, DType.I32, DType.I64
TEXT = encode_source(Source("ttir", "module {}"))
PARAMETERS = (Parameter(F32, True), Parameter(F32, True, True), Parameter(F32, False), Parameter(I32, False))
#: Parameters of y = x * by as Triton passes them, in blocks of 64: lengths after the arguments, then the status.
PASSED = ("address 0", "address 1", "value 2", "value 3", "length 0 4", "length 1 4", "status", "scratch", "null")
KINDS = [None, None, F32, I32, I64, I64, None, None, None]


def floats(address, n):
    return (ctypes.c_float * n).from_address(address)


def words(address):
    return (ctypes.c_int32 * 8).from_address(address)


class Scale:
    """The kernel on the fake driver. It records its arguments."""

    def __init__(self):
        self.given = []

    def __call__(self, values, grid, block):
        x, y, by, n, most_x, most_y, status, scratch, null = values
        self.given.append((values, grid, block))
        assert null == 0
        if scratch:
            ctypes.memset(scratch, 1, 32 * grid[0])
        for k in range(min(n, 64 * grid[0])):
            if k < most_x and k < most_y:
                floats(y, most_y)[k] = floats(x, most_x)[k] * by
            elif not words(status)[1]:
                words(status)[1] = 2 | 1 << 3


class Builder:
    """Replaces the compiler."""

    def __init__(self, images, error=None):
        self.images, self.error, self.asked = images, error, []

    def version(self):
        return ""

    def build(self, request, what):
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        code = ForeignCode("scale", PARAMETERS, ("tt.load", "tt.store in line 9"), b"", tuple(self.images))
        return encode_code(code, request["name"])


def image(code=b"fast", claims=(16, 16, 1, 16), shared=0, scratch=0):
    return Image("scale", PASSED, 128, shared, scratch, claims, code)


class Bench:
    """A device that runs the kernel, and a session on it."""

    def __init__(self, make_device, wis, images=None, error=None, **how):
        self.driver, self.wis = FakeDriver(), wis
        self.fast, self.any = Scale(), Scale()
        self.driver.functions = {b"fast": Function(KINDS, self.fast), b"any": Function(KINDS, self.any)}
        self.runtime = gpu_runtime(self.driver)
        images = [image(), image(b"any", (1, 1, 1, 1))] if images is None else images
        self.builder = self.runtime.foreign._builder = Builder(images, error)
        self.device = make_device(runtime=self.runtime)
        self.client = self.device.open("a", **how)
        self.client.channel.send(Kind.SOURCE, TEXT)
        self.made = 0

    def form(self, n, grid, options=()):
        view = View(F32, (n,), (1,))
        args = (0, 1, (F32, ParamRef(0)), (I32, ParamRef(1)))
        launch = Launch("ttir", digest(TEXT), "scale", grid, (1, 1, 1), args, options)
        operands = (Operand(Role.IN, view), Operand(Role.INOUT, view))
        return Form("kernel.launch", operands, (ParamKind.F64, ParamKind.I64), launch.attrs())

    def run(self, n=100, grid=(2, 1, 1), by=2.0, count=None, options=(), reply=False):
        """Launch the kernel on new buffers. Returns the id of the buffer that it writes."""
        self.made += 2
        self.client.make(self.made - 1, *[float(k) for k in range(n)])
        self.client.make(self.made, *[-1.0] * n)
        body = self.wis.body().add(self.form(n, grid, options), "x", "y")
        params = struct.pack("<dq", by, n if count is None else count)
        self.client.run(body, [self.made - 1, self.made], params, reply=reply)
        return self.made


def test_gpu_launch_passes_arguments_grid_threads_and_memory(make_device, wis):
    bench = Bench(make_device, wis, [image(shared=150_000, scratch=32), image(b"any", (1, 1, 1, 1))])
    bench.run(96, (2, 1, 1), 3.0)
    assert bench.client.floats(2, 96) == [3.0 * k for k in range(96)]
    ((values, grid, block),) = bench.fast.given
    assert values[2:6] == (3.0, 96, 96, 96) and values[7] and (grid, block) == ((2, 1, 1), (128, 1, 1))
    assert bench.driver.launches == [((2, 1, 1), (128, 1, 1), 150_000)]
    (asked,) = bench.builder.asked
    assert (asked["target"], asked["args"], asked["language"]) == ("cuda:sm_90", ("*f32", "*f32", "f32", "i32"), "ttir")


def test_gpu_launch_takes_memory_that_its_program_has_freed(make_device, wis):
    bench = Bench(make_device, wis)
    bench.client.make(1, *[1.0] * 96)
    launch, body = bench.form(96, (2, 1, 1)), wis.body()
    body.alloc("a", 384).add(launch, "x", "a").free("a").alloc("b", 384).add(launch, "x", "b")
    program = bench.client.define(body)
    for first, counts in ((10, (96, 20)), (20, (0, 50))):  # a run gets no memory of the run before
        bench.client.start(program, [first, 1, first + 1], struct.pack("<dqdq", 2.0, counts[0], 3.0, counts[1]))
        rest = 2.0 if counts[0] else 0.0
        assert bench.client.floats(first + 1, 96) == [3.0] * counts[1] + [rest] * (96 - counts[1])


def test_gpu_image_with_unmet_claims_is_not_launched(make_device, wis):
    bench = Bench(make_device, wis)
    bench.run(96, by=2.0)
    y = bench.run(96, by=2.0, count=90)
    assert bench.client.floats(y, 96) == [2.0 * k if k < 90 else -1.0 for k in range(96)]
    y = bench.run(99, by=2.0, count=96)  # the sizes of the buffers are no multiples of 16 bytes
    assert bench.client.floats(y, 96) == [2.0 * k for k in range(96)]
    assert (len(bench.fast.given), len(bench.any.given)) == (1, 2)
    assert fits(image(), [(512, 64), (1024, 64), 1.0, 32])
    assert not fits(image(), [(520, 64), (1024, 64), 1.0, 32])
    assert not fits(image(), [(512, 64), (1024, 60), 1.0, 32])


def test_gpu_unchecked_text_with_wrong_claims_is_refused(make_device, wis):
    bench = Bench(make_device, wis, [image()], opaque=True)
    bench.run(96, count=90, options=((UNCHECKED, True),))
    with pytest.raises(
        wis.error, match="kernel scale on a grid of 2, 1, 1: an argument is not a multiple of the number"
    ):
        bench.client.sync()
    assert not bench.driver.launches


def test_gpu_unchecked_launch_without_permission_is_refused(make_device, wis):
    bench = Bench(make_device, wis)
    bench.run(96, options=((UNCHECKED, True),))
    with pytest.raises(
        wis.error, match=r"a kernel that is launched with the option unchecked .* needs the permission"
    ) as e:
        bench.client.sync()
    assert e.value.code == "executor.opaque_kernel" and not bench.builder.asked


def test_gpu_kernel_violation_fails_only_its_launch(make_device, wis):
    bench = Bench(make_device, wis)
    bench.run(96, (3, 1, 1), count=130)
    with pytest.raises(
        wis.error,
        match=r"kernel scale on a grid of 3, 1, 1: tt\.store in line 9 writes beyond the buffer that the launch was given",
    ) as caught:
        bench.client.sync()
    assert caught.value.instruction == 0
    assert bench.client.floats(1, 2) == [0.0, 1.0]
    with pytest.raises(wis.error, match="beyond the buffer"):
        bench.client.read(2, 4)
    y = bench.run(96)  # the status words are 0 again
    assert bench.client.floats(y, 3) == [0.0, 2.0, 4.0]


def test_gpu_violation_among_launches_names_the_launch(make_device, wis):
    bench = Bench(make_device, wis)
    bench.client.make(1, *[1.0] * 96)
    for k in (2, 3):
        bench.client.make(k, *[0.0] * 96)
    good, bad = bench.form(96, (1, 1, 1)), bench.form(96, (2, 1, 1))
    body = bench.wis.body().add(good, "x", "y").add(bad, "x", "z")
    bench.client.run(body, [1, 2, 3], struct.pack("<dqdq", 2.0, 64, 2.0, 128))
    with pytest.raises(wis.error, match="kernel scale on a grid of 2, 1, 1") as caught:
        bench.client.sync()
    assert caught.value.instruction == 1
    assert bench.client.floats(2, 64) == [2.0] * 64


def test_gpu_slow_kernel_is_stopped_and_other_work_continues(make_device, wis):
    bench = Bench(make_device, wis)
    bench.runtime.kernel_s = 0.5
    bench.driver.hung = 2  # one wait times out
    bench.run()
    with pytest.raises(wis.error, match=r"kernel scale on a grid of 2, 1, 1: stopped because it took more than 0\.5 s"):
        bench.client.sync()
    assert bench.driver.ended
    other = bench.device.open("b")
    other.make(1, 5.0)
    assert other.floats(1, 1) == [5.0]
    y = bench.run()
    assert bench.client.floats(y, 2) == [0.0, 2.0]


def test_gpu_endless_kernel_ends_the_process_with_its_name(make_device, wis):
    bench = Bench(make_device, wis)
    bench.device.may_end = True
    bench.driver.hung = 10
    with pytest.raises(
        wis.error, match=r"kernel scale on a grid of 2, 1, 1 took more than 10 s .* did not end"
    ) as caught:
        bench.run(reply=True)  # asked with the launch: the connection may be closed before another request is sent
    assert caught.value.code == "executor.context_lost"
    bench.device.thread.join(10)
    assert bench.device.told[1:] == [f"ended: {bench.device.loop.lost}"]


def test_gpu_unusable_code_fails_only_its_program(make_device, wis):
    for images, says in (
        ([], "its code is for another kind of device"),
        ([image(b"another")], "scale"),
        ([image(shared=300_000)], "it needs 300000 bytes of shared memory"),
    ):
        bench = Bench(make_device, wis, images)
        if images and images[0].code == b"another":
            bench.driver.functions[b"another"] = Function([None], None)
        bench.run()
        with pytest.raises(wis.error, match=says):
            bench.client.sync()
        bench.client.make(5, 5.0)
        assert bench.client.floats(5, 1) == [5.0]


def test_gpu_failed_build_fails_only_its_program(make_device, wis):
    bench = Bench(make_device, wis, error=WorkerError("the compiler for cuda:sm_90 crashed (exit -11) on kernel scale"))
    bench.run()
    with pytest.raises(wis.error, match=r"kernel scale: the compiler for cuda:sm_90 crashed \(exit -11\)"):
        bench.client.sync()
    bench.client.make(5, 5.0)
    assert bench.client.floats(5, 1) == [5.0]


def test_gpu_misaligned_address_is_refused():
    driver = FakeDriver()
    driver.functions = {b"any": Function(KINDS, Scale())}
    runtime = gpu_runtime(driver)
    code = ForeignCode("scale", PARAMETERS, (), b"", (image(b"any", (1, 1, 1, 1)),))
    launch = runtime.kernels.load(code, (1, 1, 1))
    with pytest.raises(OperationError, match="the address of argument 1 is not a multiple of the size of f32"):
        launch([(512, 64), (1026, 64), 1.0, 4], (1, 1, 1))
