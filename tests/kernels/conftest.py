"""A device that runs kernels in other languages: an executor with OpenCL, in a process of its own."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def triton_cache(tmp_path_factory):
    """Texts of this run's own: what is captured is what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        yield


@pytest.fixture(scope="session")
def gpu(triton_cache):
    """After this, "cuda" is a device with kernels."""
    pytest.importorskip("pyopencl", reason="kernels run through OpenCL: pip install 'pyopencl[pocl]'")
    import torch
    from wooly import api
    from wooly_testkit.executor import executor_process

    torch.set_num_threads(1)
    with executor_process(runtime="opencl", threads=2) as running:
        api.attach(running.endpoints, running.session_id, running.token)
        api.install_facade()
        yield "cuda"
        api.disable()
