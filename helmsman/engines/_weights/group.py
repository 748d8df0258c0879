"""Weight-sync group: rank 0 of a training job and rollout instances; rank 0 broadcasts weights."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from helmsman.api.platforms import current_platform
from helmsman.api.weights import CollectiveTarget
from helmsman.engines._weights.broadcast_group import BroadcastGroup


class WeightGroup:
    """Membership of this process in a weight-sync group.

    On rank 0 it also holds the store where members meet. Broadcast tensors are on ``device``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._store: dist.TCPStore | None = None
        self._group: BroadcastGroup | None = None
        self._limit_s = 0.0
        """Limit of a broadcast, of the last join."""
        self._group_id = ""

    def open_store(self, address: str) -> int:
        """Become rank 0: listen on a port that the system chooses; return the port."""
        if self._store is None:
            self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def join(self, place: CollectiveTarget) -> None:
        """Join a group and leave any earlier one; block until all members have joined.

        Raises:
            ConnectionError: Not all members joined in time.
        """
        self._limit_s = place.timeout_s
        limit = timedelta(seconds=place.timeout_s)
        if self._group_id == place.group_id:
            return
        self.leave()
        try:
            if place.rank > 0:
                store: dist.Store = dist.TCPStore(
                    place.address, place.port, timeout=limit, wait_for_workers=False
                )
            elif self._store is None:
                raise ConnectionError(
                    f"this is rank 0 of {place.group_id!r}, but it is not listening; call "
                    "open_store first"
                )
            else:
                store = self._store
            prefixed = dist.PrefixStore(place.group_id, store)
            prefixed.set_timeout(limit)
            self._group = BroadcastGroup(
                current_platform.communication_backend,
                prefixed,
                place.rank,
                place.world_size,
                place.timeout_s,
            )
            # Backends connect on first use. Connect here, where a failure means that a member is
            # missing.
            self._group.broadcast(
                torch.zeros(1, dtype=torch.int64, device=self.device), place.timeout_s
            )
        except (RuntimeError, ValueError) as error:
            self.leave()
            raise ConnectionError(
                f"rank {place.rank} of {place.world_size} could not join the weight-sync group at "
                f"{place.address}:{place.port} "
                f"within {place.timeout_s:g} s ({error}). Check the members that did not report "
                "this error."
            ) from error
        self._group_id = place.group_id

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast rank 0's contiguous tensor into the members' tensors of the same size.

        Raises:
            ConnectionError: A member is missing or late. This process leaves the group, so that the
                others do not wait for it.
        """
        group = self._group
        if group is None:
            raise ConnectionError("this process has left the weight-sync group")
        try:
            group.broadcast(tensor, self._limit_s)
        except RuntimeError as error:
            self.leave()
            raise ConnectionError(
                f"a member of the weight-sync group has left or is late: {error}"
            ) from error

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Broadcast rank 0's ``data``; other members pass None."""
        size = torch.tensor([len(data or b"")], dtype=torch.int64, device=self.device)
        self.broadcast(size)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if data is not None:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        buffer = buffer.to(self.device)
        self.broadcast(buffer)
        return bytes(buffer.cpu().numpy())

    def leave(self) -> None:
        """Leave the group, which makes the others' broadcasts fail. Idempotent; any thread."""
        group, self._group, self._group_id = self._group, None, ""
        if group is not None:
            group.abort()

    def close(self) -> None:
        self.leave()
        self._store = None
