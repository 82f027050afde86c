"""What PyTorch's tests need besides the installed PyTorch: nothing here changes what a test asserts."""

import contextlib


@contextlib.contextmanager
def _side_streams():
    """A stream other than the default one on every device, by public names: PyTorch's own class uses names of its CUDA build."""
    import torch

    with contextlib.ExitStack() as stack:
        current = torch.cuda.current_device()
        for index in range(torch.cuda.device_count()):
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device=index)))
        torch.cuda.set_device(current)
        yield


def install():
    """Let device tests run on side streams, as on CUDA."""
    from torch.testing._internal import common_utils

    common_utils.CudaNonDefaultStream = _side_streams
