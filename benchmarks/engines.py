"""Engines of the cases, which are also the classes of bare Ray actors."""

from __future__ import annotations

import sys
import tempfile
from typing import Any


class Engine:
    """An engine with empty methods."""

    def __init__(self) -> None:
        self._kept: Any = None

    def ping(self) -> None:
        """An empty call."""

    def take(self, value: Any) -> None:
        """Take a value."""

    def make(self, kind: str, num_bytes: int) -> None:
        """Prepare a value for ``give``."""
        self._kept = value_of(kind, num_bytes)

    def give(self) -> Any:
        """Return the prepared value."""
        return self._kept


def value_of(kind: str, num_bytes: int) -> Any:
    """Make a 'torch' or 'numpy' value of this size."""
    if kind == "torch":
        import torch

        return torch.rand(num_bytes // 4)
    import numpy as np

    return np.random.default_rng(0).random(num_bytes // 4, dtype=np.float32)


class TorchReady:
    """Imports torch in its constructor."""

    def __init__(self) -> None:
        import torch

        self._sum = float(torch.ones(8).sum())

    def ping(self) -> None:
        """An empty call."""


class Weights:
    """The weights of a model."""

    def __init__(self, num_tensors: int, tensor_bytes: int) -> None:
        import torch

        self._state = {
            f"layer.{index}": torch.rand(tensor_bytes // 4) for index in range(num_tensors)
        }

    def export(self) -> dict[str, Any]:
        """Return the state dict."""
        return self._state

    def load(self, state: dict[str, Any]) -> None:
        """Load a state dict."""
        for name, tensor in state.items():
            self._state[name].copy_(tensor)


class Worker:
    """Computes and writes log lines."""

    def count(self, number: int) -> int:
        """Compute in pure Python, which holds the interpreter's lock."""
        total = 0
        for index in range(number):
            total += index & 7
        return total

    def print_lines(self, number: int) -> None:
        """Print lines to standard output, which is the worker's log."""
        for index in range(number):
            print(f"step {index}: loss 0.1234, reward 0.5678, tokens 123456")
        sys.stdout.flush()

    def write_lines(self, number: int) -> None:
        """Write the same lines to a file of its own."""
        with tempfile.TemporaryFile("w") as file:
            for index in range(number):
                print(f"step {index}: loss 0.1234, reward 0.5678, tokens 123456", file=file)
