"""The debug mode of `torch.cuda` in which operations that wait for the device warn or fail."""

import warnings


class SyncDebug:
    """What happens when an operation waits for the device, as `torch.cuda.set_sync_debug_mode` says.

    Attributes:
        mode: 0: nothing; 1: a warning; 2: an error.
    """

    mode = 0

    def note(self) -> None:
        """An operation is about to wait.

        Raises:
            RuntimeError: it must not.
        """
        if self.mode == 1:
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=2)
        elif self.mode:
            raise RuntimeError("called a synchronizing CUDA operation")


sync_debug = SyncDebug()
