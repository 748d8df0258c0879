"""Transports through storage: trainers write weights to memory or files, instances read them."""

from __future__ import annotations

import os

from helmsman.api.weights import DiskTarget, MemoryTarget
from helmsman.controller._weight_sync.transport import Push, Transferred, WeightTransport


class ViaMemory(WeightTransport):
    """Sends weights through host memory, from worker to worker.

    Rank 0 gathers all weights in host memory: the shared memory of its node, or Ray's object store.
    Each instance reads them from there; the instances of another node share one copy.
    """

    async def transfer(self, push: Push) -> Transferred:
        return await push.store(MemoryTarget(version=push.version))


class ViaExport(WeightTransport):
    """Like ViaMemory, for engines without ``publish_weights``: uses ``export_weights``.

    Parameters are sent unconverted: ``form`` is ignored.
    """

    async def transfer(self, push: Push) -> Transferred:
        return await push.read_by_all(await push.source.export(push.version, push.left_s))


class ViaDisk(WeightTransport):
    """Sends weights as safetensors files in a folder on storage that all workers share.

    The folder of a version appears only when it is complete. It has the Hugging Face layout, so
    other programs can read it.

    Args:
        folder: Parent folder, at the same path on all nodes; a relative path is resolved against
            the script's current folder.
        num_kept: Number of versions to keep, newest first.

    Raises:
        ValueError: ``num_kept`` is below 1.
    """

    def __init__(self, folder: str, num_kept: int = 2) -> None:
        if num_kept < 1:
            raise ValueError(f"num_kept is {num_kept}; expected 1 or more")
        self._folder, self._num_kept = os.path.abspath(folder), num_kept

    async def transfer(self, push: Push) -> Transferred:
        return await push.store(
            DiskTarget(version=push.version, folder=self._folder, num_kept=self._num_kept)
        )
