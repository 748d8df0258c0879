"""Weight-sync group: rank 0 of a training job and rollout instances; rank 0 broadcasts weights."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from helmsman.api.platforms import current_platform
from helmsman.api.weights import CollectiveTarget, DeviceTarget
from helmsman.engines._models.store import GroupStore, StoreServer, listen
from helmsman.engines._weights.broadcast_group import BroadcastGroup
from helmsman.engines._weights.device_link import (
    DeviceReceiver,
    DeviceSender,
    WeightSocket,
    connect_to,
)

_POLL_S = 0.005
_CONNECT_S = 20.0
"""Limit for members to connect once all have met; nothing else ends the wait for one that dies."""


class TensorSender(Protocol):
    """Sends headers and tensors to receivers, in order."""

    def send_header(self, data: bytes) -> None:
        """Send bytes that precede tensors, or end the transfer."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Return memory for the next tensors, (at least ``num_bytes``,) uint8, once it is free."""

    def send(self, num_bytes: int) -> None:
        """Start to send the first bytes of the memory that ``buffer`` returned last."""

    def end(self) -> None:
        """Release the memory, after the end of the transfer or an error."""


class TensorReceiver(Protocol):
    """The other end of an Outgoing."""

    def receive_header(self) -> bytes:
        """Return the next header."""

    def receive(self, num_bytes: int) -> torch.Tensor:
        """Return the next (N,) uint8 bytes, valid until the next call of either method."""

    def leave(self) -> None:
        """Stop taking part."""

    def end(self) -> None:
        """Release the memory, after the end of the transfer or an error."""


class WeightGroup:
    """Membership of this process in a weight-sync group.

    On rank 0 it also holds the listener of the store where members meet, and on any rank the socket
    where processes on its device connect. Tensors are on ``device``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._listener: socket.socket | None = None
        self._store: GroupStore | None = None
        self._group: BroadcastGroup | None = None
        self._limit_s = 0.0
        """Limit of a broadcast, of the last join."""
        self._group_id = self._given_up = ""
        """Ids of the group that is joined, and of the last one that a member has left."""
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._finish: Callable[[], None] | None = None
        """Waits for the broadcast in progress."""
        self._socket: WeightSocket | None = None

    def open_socket(self) -> str:
        """Listen for the processes on this rank's device, for the next sync; return the address."""
        self.close_socket()
        self._socket = WeightSocket()
        return self._socket.address

    def leave_out(self, place: CollectiveTarget | DeviceTarget) -> None:
        """Report that a receiver takes no part any more, at the socket or by leaving the group.

        From any thread.
        """
        if isinstance(place, CollectiveTarget):
            self._given_up = place.group_id
            if self._group_id == place.group_id:
                self.leave()
        elif (socket := self._socket) is not None:
            with contextlib.suppress(ConnectionError):  # the sync is over
                connect_to(place, socket.address, is_absent=True).close()

    def close_socket(self) -> None:
        """Stop listening, which ends the wait of processes that have connected. Idempotent."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()

    def serves(self, place: DeviceTarget) -> bool:
        """Return whether receivers connect to this rank."""
        socket = self._socket
        return socket is not None and any(
            receivers and address == socket.address
            for address, receivers in zip(place.sockets, place.receivers, strict=True)
        )

    def sending(self, place: CollectiveTarget | DeviceTarget, num_bytes: int) -> TensorSender:
        """Meet the receivers, as the sender.

        Args:
            place: The group, or the receivers on this rank's device.
            num_bytes: Size of the largest buffer; 0 if no tensors will be sent.

        Raises:
            ConnectionError: Not all members of the group joined in time.
            DeviceSharingError: The device's memory cannot be shared.
        """
        if isinstance(place, CollectiveTarget):
            self.join(place)
            return self
        try:
            links = self._socket.accept_receivers(place) if self._socket is not None else {}
        finally:
            self.close_socket()
        return DeviceSender(links, self.device, num_bytes, place.timeout_s)

    def receiving(self, place: CollectiveTarget | DeviceTarget) -> TensorReceiver:
        """Meet the sender.

        Raises:
            ConnectionError: Members of the group are late, or no trainer rank listens.
        """
        if isinstance(place, CollectiveTarget):
            self.join(place)
            return self
        return DeviceReceiver(place, self.device)

    def open_store(self, address: str) -> int:
        """Become rank 0 of the next group: listen on a port that the system chooses; return it."""
        self._close_store()
        self._listener = listen(address)
        return int(self._listener.getsockname()[1])

    def join(self, place: CollectiveTarget) -> None:
        """Join a group and leave any earlier one; block until all members have joined.

        Raises:
            ConnectionError: Not all members joined in time.
        """
        self._limit_s = place.timeout_s
        if self._group_id == place.group_id:
            return
        self.leave()
        try:
            self._store = store = self._open(place)
            self._meet(store, place)
            self._group = BroadcastGroup(
                current_platform.communication_backend,
                store,
                place.rank,
                place.world_size,
                min(place.timeout_s, _CONNECT_S),
            )
            self._group_id = place.group_id
            if self._given_up == place.group_id:
                raise RuntimeError("a member has failed")
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

    def _open(self, place: CollectiveTarget) -> GroupStore:
        listener, self._listener = self._listener, None
        self._close_store()
        server = None
        if place.rank == 0:
            if listener is None:
                raise ConnectionError(
                    f"this is rank 0 of {place.group_id!r}, but it is not listening; call "
                    "open_store first"
                )
            server = StoreServer(listener, place.key)
        return GroupStore(place.address, place.port, place.key, place.timeout_s, server)

    def _close_store(self) -> None:
        listener, self._listener = self._listener, None
        store, self._store = self._store, None
        for each in (listener, store):
            if each is not None:
                each.close()

    def _meet(self, store: GroupStore, place: CollectiveTarget) -> None:
        """Wait until all members are at the store: a backend would wait for a dead one."""
        store.set(f"member {place.rank}", "")
        if place.rank > 0:
            if store.get("verdict") != b"complete":
                raise RuntimeError("another member has failed")
            return
        members = [f"member {rank}" for rank in range(place.world_size)]
        deadline, failure = time.monotonic() + place.timeout_s, ""
        while not failure and not store.check(members):
            if self._given_up == place.group_id:
                failure = "a member has failed"
            elif time.monotonic() > deadline:
                failure = "a member is late"
            time.sleep(_POLL_S)
        store.set("verdict", "incomplete" if failure else "complete")
        if failure:
            raise RuntimeError(failure)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast rank 0's contiguous tensor into the members' tensors of the same size.

        Raises:
            ConnectionError: A member is missing or late. This process leaves the group, so that the
                others do not wait for it.
        """
        self._begin(tensor)
        self._wait()

    def _begin(self, tensor: torch.Tensor) -> None:
        """Begin a broadcast after the one in progress."""
        self._wait()
        group = self._group
        if group is None:
            raise ConnectionError("this process has left the weight-sync group")
        with self._leaving_on_error():
            self._finish = group.begin_broadcast(tensor, self._limit_s)

    def _wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            with self._leaving_on_error():
                finish()

    @contextlib.contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        try:
            yield
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

    def send_header(self, data: bytes) -> None:
        self.broadcast_bytes(data)

    def receive_header(self) -> bytes:
        return self.broadcast_bytes(None)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        self._wait()
        if self._buffer.numel() < num_bytes:
            self._buffer = self._buffer.new_empty(num_bytes)
        return self._buffer

    def send(self, num_bytes: int) -> None:
        # It is in progress while the trainer gathers the next tensors.
        self._begin(self._buffer[:num_bytes])

    def receive(self, num_bytes: int) -> torch.Tensor:
        try:
            arrived = self.buffer(num_bytes)[:num_bytes]
        except RuntimeError:  # Out of memory: leave, or the other members would wait.
            self.leave()
            raise
        self.broadcast(arrived)
        return arrived

    def end(self) -> None:
        self._buffer = self._buffer.new_empty(0)

    def leave(self) -> None:
        """Leave the group, which makes the others' broadcasts fail. Idempotent; any thread."""
        group, self._group, self._group_id = self._group, None, ""
        self._finish = None
        if group is not None:
            group.abort()

    def close(self) -> None:
        self.leave()
        self.close_socket()
        self._close_store()
