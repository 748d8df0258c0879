"""Transfer of weights into the processes of a vLLM instance: shared memory, files or streams."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from helmsman.api.errors import EngineDeadError
from helmsman.api.weights import CollectiveTarget, DeviceTarget, Weights, WeightsOnDisk
from helmsman.engines._models.adapter_files import is_adapter_in_files, write_received
from helmsman.engines._weights.fit import Expected, expected_of, require_fit
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines._weights.sending import as_bytes
from helmsman.engines._weights.shared_memory import DeviceSharingError, HostBuffer
from helmsman.engines.weight_transfer import Incoming, incoming
from helmsman.engines.weights import partial_update

Call = Callable[..., Awaitable[list[dict[str, Any]]]]
"""``call(method, *args)`` calls a method of VLLMWorkerExtension on all ranks; returns Outcomes."""

_ALIGNMENT = 64

_TYPES: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (
        ConnectionError,
        DeviceSharingError,
        FileNotFoundError,
        MemoryError,
        OSError,
        PermissionError,
        ValueError,
    )
}


class VLLMTransfer:
    """Loads weights on all ranks of an instance, while it decodes nothing.

    ``model`` is the folder that defines the accepted names and shapes. At most ``bucket_bytes``
    pass through shared memory at once. Each ``policy`` is in weight-sync groups of its own.
    """

    def __init__(self, model: str, bucket_bytes: int, policy: str = "") -> None:
        self._model, self._bucket_bytes, self._policy = model, bucket_bytes, policy
        self._forms: list[Expected] = []

    async def carry(
        self, weights: Weights, call: Call, folder: str, is_shared: bool = False
    ) -> bool:
        """Load these weights on every rank, or write an adapter to ``folder``, if it is not ''.

        Returns whether it was an adapter, which is not loaded yet. A base model that policies share
        takes nothing else.

        Raises:
            ValueError: The weights do not fit; nothing has changed.
            ConnectionError: A member of the weight-sync group, or the trainer rank on a device, is
                missing or late; nothing has changed.
            DeviceSharingError: Memory of the devices cannot be shared; nothing has changed.
            OSError: The files cannot be read; nothing has changed.
            PartialWeightUpdateError: The update failed half-way.
            EngineDeadError: vLLM's processes have ended.
        """
        if not self._forms:
            self._forms = await asyncio.to_thread(expected_of, self._model)
        forms = [] if is_shared else self._forms
        if isinstance(weights, CollectiveTarget | DeviceTarget):
            place, accepted = msgspec.to_builtins((weights, forms))
            _require_done(await call("helmsman_receive", place, accepted, folder, self._policy))
            return os.path.isdir(folder)
        arriving = await asyncio.to_thread(_fitting, weights, forms)
        if is_adapter_in_files(arriving.shapes):
            await asyncio.to_thread(write_received, folder, arriving)
        elif isinstance(weights, WeightsOnDisk):
            _require_done(await call("helmsman_load_files", os.path.abspath(weights.path)))
        else:
            await self._hand_over(arriving, call)
        return os.path.isdir(folder)

    async def forget_adapters(self, call: Call) -> None:
        _require_done(await call("helmsman_forget_adapters"))

    async def _hand_over(self, arriving: Incoming, call: Call) -> None:
        has_begun = False
        try:
            with shared({}) as nothing:
                _require_done(await call("helmsman_begin", nothing))
            has_begun = True
            for bucket in arriving:
                for part in split(bucket, self._bucket_bytes):
                    with contextlib.ExitStack() as stack:
                        message = await asyncio.to_thread(stack.enter_context, shared(part))
                        _require_done(await call("helmsman_load", message))
            _require_done(await call("helmsman_end"))
        except EngineDeadError:
            raise
        except Exception as error:
            with contextlib.suppress(Exception):  # the first error is raised
                await call("helmsman_end")
            if isinstance(error, OSError) and not has_begun:
                raise OSError(
                    f"a process of vLLM cannot open the memory of its parent ({error}): this "
                    "transfer works only if the instance is on one node. Use ViaDisk or "
                    "ViaCollective."
                ) from error
            raise partial_update(error) from error


def _fitting(weights: Weights, forms: Sequence[Expected]) -> Incoming:
    with incoming(weights, WeightGroup(torch.device("cpu"))) as arriving:
        # The result stays valid after the block, because these are not broadcasts.
        if not is_adapter_in_files(arriving.shapes):
            require_fit(forms, arriving.shapes)
        return arriving


@contextlib.contextmanager
def shared(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """Copy tensors to shared memory for processes of this user on this machine.

    Yields a message of plain types for read_shared.
    """
    entries: dict[str, list[Any]] = {}
    end = 0
    for name, tensor in tensors.items():
        entries[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end]
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    with contextlib.closing(HostBuffer(max(end, 1))) as memory:
        for name, tensor in tensors.items():
            start = entries[name][2]
            memory.tensor[start : start + tensor.nbytes].copy_(as_bytes(tensor))
        yield {"path": memory.path, "entries": entries}


def read_shared(message: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a message, mapped copy-on-write; they keep the mapping alive."""
    with open(message["path"], "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors = {}
    for name, (dtype, shape, start) in message["entries"].items():
        kind, count = getattr(torch, dtype), torch.Size(shape).numel()
        flat = (
            torch.frombuffer(memory, dtype=kind, count=count, offset=start)
            if count
            else torch.empty(0, dtype=kind)
        )
        tensors[name] = flat.view(shape)
    return tensors


def split(
    tensors: Mapping[str, torch.Tensor], bucket_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    part: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        if part and num_bytes + tensor.nbytes > bucket_bytes:
            yield part
            part, num_bytes = {}, 0
        part[name] = tensor
        num_bytes += tensor.nbytes
    if part:
        yield part


def _require_done(outcomes: list[dict[str, Any]]) -> None:
    """Raise the first error of a rank.

    A ConnectionError may be a consequence of another rank's error, so it is raised only if all
    errors are ConnectionErrors.
    """
    failed = [outcome for outcome in outcomes if outcome]
    if failed:
        name, text = next(
            (each["error"] for each in failed if each["error"][0] != "ConnectionError"),
            failed[0]["error"],
        )
        raise (
            partial_update(text)
            if any(each["torn"] for each in failed)
            else _TYPES.get(name, RuntimeError)(text)
        )
