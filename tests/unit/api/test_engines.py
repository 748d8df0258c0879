"""Test the defaults of the engine contracts."""

from __future__ import annotations

from typing import Any

import pytest

from helmsman.api.engines import TrainEngine
from helmsman.api.weights import DiskTarget, MemoryTarget, WeightFormat, WeightsInMemory

UNUSED: Any = None


class Minimal(TrainEngine):
    """Has the methods that an engine must have, on one of two ranks."""

    def __init__(self, rank: int) -> None:
        self.rank, self.version = rank, 3

    def export_weights(self) -> Any:
        return {"weight": [1.0]} if self.rank == 0 else None

    def get_version(self) -> int:
        return self.version

    create_process_group = initialize = train_batch = eval_batch = forward = UNUSED
    save = load = set_version = set_lr = destroy = UNUSED


def test_publish_weights_by_default_exports_to_memory() -> None:
    target = MemoryTarget(version=3)
    sent = [Minimal(rank).publish_weights(target, WeightFormat()) for rank in range(2)]
    assert sent == [WeightsInMemory({"weight": [1.0]}), None]
    with pytest.raises(ValueError, match="weight version 3, but version 2 was to be sent"):
        Minimal(0).publish_weights(MemoryTarget(version=2), WeightFormat())
    message = "Minimal has no publish_weights; it sends weights only by ViaMemory"
    with pytest.raises(NotImplementedError, match=message):
        Minimal(0).publish_weights(target, WeightFormat(dtype="bfloat16"))
    with pytest.raises(NotImplementedError, match=message):
        Minimal(0).publish_weights(DiskTarget(version=3, folder="/tmp"), WeightFormat())
