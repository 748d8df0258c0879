"""CUDA graphs of a decoding step, one for each shape of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

Tensors = tuple[torch.Tensor, torch.Tensor]
logger = logging.getLogger(__name__)


class StepGraphs:
    """Calls a function of a shape; on CUDA, replays its kernels from the second call of a shape on.

    The function must keep its state in tensors that stay where they are, and must not wait for the
    device. The first call of a shape loads its kernels, which a capture cannot. If a capture fails,
    a warning is logged and new shapes run without graphs.
    """

    def __init__(self, function: Callable[..., Tensors], device: torch.device) -> None:
        self.is_enabled = device.type == "cuda"
        self._function = function
        self._captured: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensors] | None] = {}

    def __call__(self, *shape: int) -> Tensors:
        """Call the function; its results are valid until the next call."""
        if self.is_enabled and shape in self._captured and self._captured[shape] is None:
            self._capture(shape)
        captured = self._captured.setdefault(shape)
        if captured is None:
            return self._function(*shape)
        captured[0].replay()
        return captured[1]

    def _capture(self, shape: tuple[int, ...]) -> None:
        # All graphs share memory: they run one after another, and their results are read at once.
        pool = next((each[0].pool() for each in self._captured.values() if each), None)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of the process may use the device meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                results = self._function(*shape)
            self._captured[shape] = graph, results
        except RuntimeError as error:
            self.is_enabled = False
            logger.warning("decoding goes on without CUDA graphs, slower: %s", error, exc_info=True)

    def clear(self) -> None:
        """Drop the graphs; the device must not be running one."""
        self._captured.clear()
