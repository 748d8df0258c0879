"""Engines of the cases. Bare Ray actors are made of the same classes."""

from __future__ import annotations

from typing import Any


class Engine:
    """Does next to nothing."""

    def __init__(self) -> None:
        self._kept: Any = None

    def ping(self) -> None:
        """An empty call."""

    def take(self, value: Any) -> None:
        """For the way there."""

    def make(self, kind: str, num_bytes: int) -> None:
        """Have a value ready for ``give``."""
        self._kept = value_of(kind, num_bytes)

    def give(self) -> Any:
        """For the way back."""
        return self._kept


def value_of(kind: str, num_bytes: int) -> Any:
    """A 'torch' or 'numpy' value of so many bytes."""
    if kind == "torch":
        import torch

        return torch.rand(num_bytes // 4)
    import numpy as np

    return np.random.default_rng(0).random(num_bytes // 4, dtype=np.float32)


class TorchReady:
    """Can compute with torch once it is there."""

    def __init__(self) -> None:
        import torch

        self._sum = float(torch.ones(8).sum())

    def ping(self) -> None:
        """An empty call."""
