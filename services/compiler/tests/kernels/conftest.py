"""The device of these tests: it runs kernels in other languages with OpenCL, and has a compiler."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def triton_cache(tmp_path_factory):
    """A new, empty Triton cache for this run, so that the tests use texts captured in this run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        yield


@pytest.fixture(scope="session")
def gpu(triton_cache, cuda):
    """ "cuda" as a device that runs kernels."""
    pytest.importorskip("pyopencl", reason="kernels run through OpenCL: pip install 'pyopencl[pocl]'")
    return cuda
