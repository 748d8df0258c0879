"""The ways of weights into the processes of a vLLM instance: shared memory, files, or a trainer's broadcasts."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import torch

from helmsman.api.errors import EngineDeadError
from helmsman.api.weights import ByCollective, Weights, WeightsOnDisk
from helmsman.engines._vllm.buckets import SharedBucket, device_message, split
from helmsman.engines._vllm.fit import Expected, expected_of, require_fit
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines.weight_transfer import Incoming, incoming
from helmsman.engines.weights import PartialWeightUpdateError

Call = Callable[..., Awaitable[list[dict[str, Any]]]]
"""``call(method, *args)``: a method of VLLMWorkerExtension on all ranks; the Outcome of each."""

_TYPES: dict[str, type[Exception]] = {
    each.__name__: each for each in (ConnectionError, FileNotFoundError, MemoryError, OSError, PermissionError, ValueError)
}


class VLLMTransfer:
    """Brings weights to all ranks of an instance, which decode nothing meanwhile.

    Args:
        model: the folder, for what weights must look like.
        bucket_bytes: of what goes through shared memory at once.
    """

    def __init__(self, model: str, bucket_bytes: int) -> None:
        self._model, self._bucket_bytes = model, bucket_bytes
        self._forms: list[Expected] = []

    async def carry(self, weights: Weights, call: Call) -> None:
        """Have every rank use these weights.

        Raises: ValueError for weights that do not fit, ConnectionError and OSError as ``incoming``, all with nothing changed;
            PartialWeightUpdateError when it ended half-way; EngineDeadError.
        """
        if not self._forms:
            self._forms = await asyncio.to_thread(expected_of, self._model)
        if isinstance(weights, ByCollective):
            forms = msgspec.to_builtins(self._forms)
            _require_done(await call("helmsman_receive", msgspec.to_builtins(weights), forms))
            return
        arriving = await asyncio.to_thread(self._fitting, weights)
        if isinstance(weights, WeightsOnDisk):
            _require_done(await call("helmsman_load_files", os.path.abspath(weights.path)))
        else:
            await self._hand_over(arriving, call)

    def _fitting(self, weights: Weights) -> Incoming:
        with incoming(weights, WeightGroup(torch.device("cpu"))) as arriving:  # nothing of it lasts, as they are no broadcasts
            require_fit(self._forms, arriving.shapes)
            return arriving

    async def _hand_over(self, arriving: Incoming, call: Call) -> None:
        with contextlib.closing(SharedBucket({})) as nothing:
            try:
                _require_done(await call("helmsman_probe", nothing.message["path"]))
            except EngineDeadError:
                raise
            except OSError as error:
                raise OSError(
                    f"a process of vLLM cannot open the memory of its parent ({error}): weights reach only instances on one "
                    "node this way. Use ViaDisk or ViaCollective."
                ) from error
        try:
            _require_done(await call("helmsman_begin"))
            for bucket in arriving:
                for part in split(bucket, self._bucket_bytes):
                    await self._load(part, call)
            _require_done(await call("helmsman_end"))
        except EngineDeadError:
            raise
        except Exception as error:
            with contextlib.suppress(Exception):  # whatever it says, the weights are torn
                await call("helmsman_give_up")
            raise PartialWeightUpdateError(
                f"the weights were exchanged in part: {type(error).__name__}: {error}. Nothing is decoded by them until an "
                "update is completed."
            ) from error

    async def _load(self, tensors: Mapping[str, torch.Tensor], call: Call) -> None:
        on_device = {name: tensor for name, tensor in tensors.items() if tensor.device.type != "cpu"}
        on_host = {name: tensor for name, tensor in tensors.items() if name not in on_device}
        if on_device:
            _require_done(await call("helmsman_load", device_message(on_device)))
        if on_host:
            with contextlib.closing(await asyncio.to_thread(SharedBucket, on_host)) as bucket:
                _require_done(await call("helmsman_load", bucket.message))


def _require_done(outcomes: list[dict[str, Any]]) -> None:
    """Raise what the ranks say, the first that is no mere consequence first."""
    failed = [outcome for outcome in outcomes if outcome]
    if not failed:
        return
    worst = next((outcome for outcome in failed if outcome["error"][0] != "ConnectionError"), failed[0])
    name, text = worst["error"]
    if any(outcome["torn"] for outcome in failed):
        raise PartialWeightUpdateError(
            f"the weights were exchanged in part: {text}. Nothing is decoded by them until an update is completed."
        )
    raise _TYPES.get(name, RuntimeError)(text)
