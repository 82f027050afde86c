"""Kernels in PTX, which cannot be checked. They are assembled for NVIDIA's chips only."""

import pytest

pytest.importorskip("triton", reason="Triton, which brings ptxas, is not installed: pip install triton")
from wooly_compiler.build.worker import Limits, WorkerProcess
from wooly_compiler.errors import BuildError
from wooly_wis.foreign import decode_code


@pytest.fixture
def build(tmp_path):
    """Builds as the compiler service does for an executor."""
    found = WorkerProcess(Limits(seconds=200), "wooly_compiler.worker", (str(tmp_path),))

    def ask(text, target, **options):
        asked = {
            "language": "ptx",
            "text": text,
            "entry": "k",
            "args": ("*u8", "i64"),
            "block": (64, 1, 1),
            "target": target,
        }
        asked |= {"what": "foreign", "options": sorted(options.items()), "name": "n"}
        return decode_code(found.ask(asked, target, "kernel"), "n")

    yield ask
    found.close()


def test_ptx_builds_for_nvidia_only(build):
    text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 p, .param .s64 n) { ret; }\n"
    (image,) = build(text, "cuda:sm_90", shared=256).images
    assert (image.passed, image.threads, image.shared) == (("address 0", "value 1"), 0, 256) and image.code[
        :4
    ] == b"\x7fELF"
    with pytest.raises(BuildError, match="ptx is code for NVIDIA's chips; this device is gfx942"):
        build(text, "hip:gfx942")
    with pytest.raises(BuildError, match="ptxas rejects the text"):
        build(text.replace("ret;", "rot;"), "cuda:sm_90")
