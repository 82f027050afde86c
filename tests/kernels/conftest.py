"""The device of all tests, where it runs kernels in other languages: with OpenCL, and a compiler beside it."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def triton_cache(tmp_path_factory):
    """Texts of this run's own: what is captured is what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        yield


@pytest.fixture(scope="session")
def gpu(triton_cache, cuda):
    """After this, "cuda" is a device with kernels."""
    pytest.importorskip("pyopencl", reason="kernels run through OpenCL: pip install 'pyopencl[pocl]'")
    return cuda
