"""Formats, targets and locations of weights in transfer from trainer ranks to rollout instances.

The controller imports this module, so it does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from helmsman.api.suggestions import Suggesting


class WeightFormat(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """Conversion of parameters before they leave a trainer."""

    dtype: str | None = None
    """Floating-point type to cast to, such as 'bfloat16'; None keeps the type."""
    names: tuple[tuple[str, str], ...] = ()
    """Pairs of a regular expression and its replacement in parameter names (``re.sub``), applied in
    order.
    """
    adapters: bool = False
    """Whether a trainer of adapters (TrainConfig.lora) sends these alone, to instances that have
    their base model. Otherwise it sends the whole model with the adapters merged into it.
    """
    bucket_bytes: int = 256 << 20
    """Size of a bucket: parameters that are cast, sent, written and checked together. Besides the
    model, a sender needs memory for two buckets and 64 MiB, with ViaDevice for three, and a
    receiver for one. A larger parameter is a bucket of its own; broadcasts send it in pieces, which
    receivers collect on the host, and the buffers of ViaDevice have its size.
    """
    checksum: bool = False
    """Whether to compute a CRC-32 of every parameter's bytes at the sender and check it at the
    receiver.
    """

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}; expected 1 or more")
        for pattern, replacement in self.names:
            try:
                compiled = re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"names has {pattern!r}, which is not a regular expression: {error}"
                ) from error
            try:
                compiled.sub(replacement, "")  # Parses the replacement even without a match.
            except (re.error, IndexError) as error:
                raise ValueError(
                    f"names cannot replace {pattern!r} by {replacement!r}: {error}"
                ) from error

    def name_of(self, name: str) -> str:
        """Return a parameter's name at the receiver."""
        for pattern, replacement in self.names:
            name = re.sub(pattern, replacement, name)
        return name


class MemoryTarget(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Return the weights as WeightsInMemory."""

    version: int
    """Expected weight version; the engine raises an error if its weights have changed since."""


class DiskTarget(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write the weights to a new directory below ``folder`` and return WeightsOnDisk."""

    version: int
    """Expected weight version; see MemoryTarget."""
    folder: str
    num_kept: int = 2
    """Number of versions to keep there, this one included."""


class CollectiveTarget(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Broadcast the weights in a process group and return the number of bytes.

    The group consists of one trainer rank, as rank 0, and the rollout instances. An instance
    receives the same struct as its Weights.
    """

    version: int
    """Expected weight version; see MemoryTarget."""
    group_id: str
    """Identifies the group: a member leaves an earlier group when it receives another id."""
    address: str
    port: int
    """Port of rank 0's store, through which the members connect."""
    key: str
    """Secret of this group, which members must have."""
    rank: int
    world_size: int
    timeout_s: float
    """Limit in seconds for a member to wait for the others, at the start and in each broadcast."""


class DeviceTarget(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fill buffers for the processes on each trainer rank's device, and return the number of bytes.

    An instance receives the same struct as its Weights, with the addresses for its own devices.
    """

    version: int
    """Expected weight version; see MemoryTarget."""
    key: str
    """Secret of this sync, which receivers must have."""
    sockets: tuple[str, ...]
    """Addresses of TrainEngine.open_weight_socket: of all trainer ranks in order, or, for an
    instance, those of the ranks on its devices in order.
    """
    receivers: tuple[tuple[str, ...], ...] = ()
    """Instances that connect to each socket of the trainer."""
    receiver: str = ""
    """Id of the instance; '' for the trainer."""
    timeout_s: float
    """Limit in seconds for a trainer rank to wait for a receiver; twice that for a receiver."""


WeightTarget: TypeAlias = MemoryTarget | DiskTarget | CollectiveTarget | DeviceTarget


class WeightsInMemory(msgspec.Struct, frozen=True):
    """Parameters by name, with CRC-32 checksums if requested."""

    tensors: Mapping[str, Any]
    checksums: Mapping[str, int] = {}


class WeightsOnDisk(msgspec.Struct, frozen=True):
    """Safetensors files and a Hugging Face index, in a directory that every worker can read."""

    path: str
    num_bytes: int = 0


Weights: TypeAlias = (
    Mapping[str, Any] | WeightsInMemory | WeightsOnDisk | CollectiveTarget | DeviceTarget
)
"""Argument of ``InferenceEngine.update_weights``: tensors by name, or their location.
``helmsman.engines.weight_transfer`` reads all forms.
"""
