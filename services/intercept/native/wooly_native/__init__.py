"""Native kernels of Wooly's client. `wooly` finds this package and uses it; nothing else imports it."""

from wooly_native._built import TORCH

__all__ = ["TORCH"]
