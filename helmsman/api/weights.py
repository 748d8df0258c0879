"""How weights travel from a trainer's ranks to rollout instances. No torch: these are read by the
controller too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from helmsman.api.suggestions import Suggesting


class WeightFormat(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """What is made of parameters before they leave a trainer."""

    dtype: str | None = None
    """Floating-point type that they are cast to, such as 'bfloat16'; None leaves them as they
    are.
    """
    names: tuple[tuple[str, str], ...] = ()
    """Pairs of a regular expression and what replaces each match in a parameter's name
    (``re.sub``), one after another.
    """
    bucket_bytes: int = 256 << 20
    """Parameters that are cast, sent, written and checked together; beside the model a sender needs
    two such buckets and a receiver one. A parameter that is larger is a bucket of its own."""
    checksum: bool = False
    """Whether every parameter's bytes are summed up (CRC-32) where they leave and checked where
    they arrive.
    """

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}; expected 1 or more")
        for pattern, replacement in self.names:
            try:
                compiled = re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"names has {pattern!r}, which is no regular expression: {error}"
                ) from error
            try:
                compiled.sub(replacement, "")  # reads the replacement, also where nothing matches
            except (re.error, IndexError) as error:
                raise ValueError(
                    f"names replaces {pattern!r} by {replacement!r}, which cannot be: {error}"
                ) from error

    def name_of(self, name: str) -> str:
        """What a parameter is called where it arrives."""
        for pattern, replacement in self.names:
            name = re.sub(pattern, replacement, name)
        return name


class MemoryTarget(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To be returned, as WeightsInMemory."""

    version: int
    """That they are expected to have: the engine refuses where its weights have gone on since it
    was asked for it.
    """


class DiskTarget(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Into a folder of its own below ``folder``; returned are WeightsOnDisk."""

    version: int
    """As of MemoryTarget."""
    folder: str
    num_kept: int = 2
    """Versions that stay there, this one included."""


class CollectiveTarget(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """By broadcasts of a process group of one trainer rank, which is its rank 0, and the rollout
    instances; it is also what an instance is given for its weights. Returned is the number of
    bytes.
    """

    version: int
    """As of MemoryTarget."""
    group_id: str
    """Who is in it: a member leaves an earlier group when it is given another id."""
    address: str
    port: int
    """Of rank 0's store, where they meet."""
    rank: int
    world_size: int
    timeout_s: float
    """How long a member waits for the others, at the start and in each broadcast."""


WeightTarget: TypeAlias = MemoryTarget | DiskTarget | CollectiveTarget


class WeightsInMemory(msgspec.Struct, frozen=True):
    """Parameters by name, each with its CRC-32 where that was asked for."""

    tensors: Mapping[str, Any]
    checksums: Mapping[str, int] = {}


class WeightsOnDisk(msgspec.Struct, frozen=True):
    """Files of safetensors in a folder that every worker can read, with an index as Hugging Face
    writes it.
    """

    path: str
    num_bytes: int = 0


Weights: TypeAlias = Mapping[str, Any] | WeightsInMemory | WeightsOnDisk | CollectiveTarget
"""What ``InferenceEngine.update_weights`` is given: tensors by name, or where to get them;
``helmsman.engines.weight_transfer`` reads them all alike."""
