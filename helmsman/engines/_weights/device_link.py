"""Weights from a trainer rank to the processes on its device, through two shared buffers.

    trainer rank                              rollout process on the same device
      listens at its socket    <-- hello -----  connects
      makes two buffers        --- handles -->  maps them
      fills buffer 0           --- filled --->  loads it
      fills buffer 1               <-- ack ---  has loaded buffer 0
      waits for that ack, then fills buffer 0 again ...
      waits                     <- closes ----  has unmapped both

Only handles and headers pass through the socket. Each end detects the death of the other by the end
of the connection. The trainer accepts processes of this user that have the key of the sync.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeAlias

import msgspec
import torch

from helmsman.api.platforms import current_platform
from helmsman.api.weights import DeviceTarget
from helmsman.engines._weights.shared_memory import SharedBuffer, open_buffer, release_shared

log = logging.getLogger(__name__)

NUM_BUFFERS = 2


class _Hello(msgspec.Struct, frozen=True):
    key: str
    receiver: str
    is_absent: bool = False
    """Sent on behalf of a receiver that will not connect."""


class _Handles(msgspec.Struct, frozen=True, tag=True):
    handles: list[bytes]


class _HeaderFrame(msgspec.Struct, frozen=True, tag=True):
    data: bytes


class _Filled(msgspec.Struct, frozen=True, tag=True):
    buffer: int


_Message: TypeAlias = _Handles | _HeaderFrame | _Filled
_ACK = b"loaded"


class WeightSocket:
    """Socket on which a trainer rank accepts the processes on its device, for one sync."""

    def __init__(self) -> None:
        self.address = f"helmsman-weights-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX)
        # An abstract address ends with its socket, so no file can be left behind.
        self._socket.bind(f"\0{self.address}")
        self._socket.listen()

    def accept_receivers(self, place: DeviceTarget) -> dict[str, Connection]:
        """Wait until every receiver of this socket has connected, is absent or is late."""
        expected = set(place.receivers[place.sockets.index(self.address)])
        deadline = time.monotonic() + place.timeout_s
        links: dict[str, Connection] = {}
        while expected:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                peer, _ = self._socket.accept()
            except TimeoutError:
                log.warning(
                    "%s did not connect within %g s to receive weights",
                    ", ".join(sorted(expected)),
                    place.timeout_s,
                )
                break
            if not _is_own(peer):
                peer.close()
                continue
            link = _link(peer, place.timeout_s)
            with contextlib.suppress(EOFError, OSError, msgspec.DecodeError):
                hello = msgspec.msgpack.decode(link.recv_bytes(), type=_Hello)
                if hello.receiver in expected and hmac.compare_digest(hello.key, place.key):
                    expected.remove(hello.receiver)
                    if not hello.is_absent:
                        links[hello.receiver] = link
                        continue
            link.close()
        return links

    def close(self) -> None:
        self._socket.close()


def connect_to(place: DeviceTarget, address: str, *, is_absent: bool = False) -> Connection:
    """Connect to a socket as a receiver, or on behalf of one that is absent.

    Raises:
        ConnectionError: The trainer rank does not listen there (any more).
    """
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(place.timeout_s)
    try:
        peer.connect(f"\0{address}")
        if not _is_own(peer):
            raise ConnectionError("another user listens there")
        # A sender may wait for another receiver until its own limit.
        link = _link(peer, 2 * place.timeout_s)
        hello = _Hello(place.key, place.receiver, is_absent)
        link.send_bytes(msgspec.msgpack.encode(hello))
    except OSError as error:
        peer.close()
        raise ConnectionError(
            f"the trainer rank on this device does not listen for receivers of weights: {error}"
        ) from error
    return link


def _is_own(peer: socket.socket) -> bool:
    """Return whether the process at the other end is of this user."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


def _link(peer: socket.socket, timeout_s: float) -> Connection:
    """Make a connection whose reads and writes raise BlockingIOError after ``timeout_s``."""
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    peer.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, limit)
    return Connection(peer.detach())


class DeviceSender:
    """A trainer rank's end: fills buffers for all receivers at its socket.

    A receiver that has exited, has failed or is late is skipped from then on. This is only logged,
    because its instance reports the failure.

    Args:
        links: Connection of each receiver.
        device: Device of the buffers.
        num_bytes: Size of a buffer; 0 if no tensors will be sent.
        timeout_s: Limit in seconds of the connections, for the log.

    Raises:
        DeviceSharingError: The device's memory cannot be shared.
    """

    def __init__(
        self, links: dict[str, Connection], device: torch.device, num_bytes: int, timeout_s: float
    ) -> None:
        self._links, self._device, self._timeout_s = links, device, timeout_s
        self._pair: list[SharedBuffer] = []
        self._num_filled = 0
        if not num_bytes:
            return
        try:
            for _ in range(NUM_BUFFERS):
                self._pair.append(SharedBuffer(num_bytes, device))
        except BaseException:
            self._release()
            raise
        self._send(_Handles([buffer.handle for buffer in self._pair]))

    def send_header(self, data: bytes) -> None:
        """Send bytes that precede tensors, or end the transfer."""
        self._send(_HeaderFrame(data))

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Return the next buffer, after all receivers have loaded its previous content."""
        if self._num_filled >= NUM_BUFFERS:
            self._with_each(_await_ack)
        return self._pair[self._num_filled % NUM_BUFFERS].tensor

    def send(self, num_bytes: int) -> None:
        """Pass on the buffer that was returned last; the receivers load it meanwhile."""
        current_platform.synchronize()
        self._send(_Filled(self._num_filled % NUM_BUFFERS))
        self._num_filled += 1

    def end(self) -> None:
        """Wait until the receivers have unmapped the buffers, then release these. Idempotent."""
        self._with_each(_await_end)
        self._release()

    def _release(self) -> None:
        for link in self._links.values():
            link.close()
        self._links = {}
        for buffer in self._pair:
            buffer.close()
        if self._pair:
            self._pair = []
            release_shared(self._device)

    def _send(self, message: _Message) -> None:
        data = msgspec.msgpack.encode(message)
        self._with_each(lambda link: link.send_bytes(data))

    def _with_each(self, work: Callable[[Connection], None]) -> None:
        for receiver, link in list(self._links.items()):
            try:
                work(link)
            except (EOFError, OSError) as error:
                log.warning(
                    "%s receives no more weights: %s", receiver, _why(error, self._timeout_s)
                )
                self._links.pop(receiver).close()


def _await_ack(link: Connection) -> None:
    link.recv_bytes()


def _await_end(link: Connection) -> None:
    with contextlib.suppress(EOFError):
        while True:
            link.recv_bytes()


class DeviceReceiver:
    """A receiver's end: yields the headers and buffers of the trainer rank on its device.

    Args:
        place: The target; its first socket is the address.
        device: Device of this process.

    Raises:
        ConnectionError: The trainer rank does not listen there (any more).
    """

    def __init__(self, place: DeviceTarget, device: torch.device) -> None:
        self._device, self._timeout_s = device, 2 * place.timeout_s
        self._pair: list[torch.Tensor] = []
        self._is_loading = False
        self._link = connect_to(place, place.sockets[0])

    def receive_header(self) -> bytes:
        """Return the next header. Buffers that were returned before become invalid.

        Raises:
            ConnectionError: The trainer rank has exited, has failed or is late.
            DeviceSharingError: The trainer's buffers cannot be mapped.
        """
        message = self._receive()
        if isinstance(message, _Handles):
            self._pair = [open_buffer(each, self._device) for each in message.handles]
            message = self._receive()
        assert isinstance(message, _HeaderFrame)
        return message.data

    def receive(self, num_bytes: int) -> torch.Tensor:
        """Return the next (N,) uint8 bytes, valid until the next call.

        Raises:
            ConnectionError: The trainer rank has exited, has failed or is late.
        """
        message = self._receive()
        assert isinstance(message, _Filled)
        self._is_loading = True
        return self._pair[message.buffer][:num_bytes]

    def _receive(self) -> _Message:
        try:
            if self._is_loading:
                self._is_loading = False
                current_platform.synchronize()
                self._link.send_bytes(_ACK)
            data = self._link.recv_bytes()
        except (EOFError, OSError) as error:
            raise ConnectionError(
                f"the trainer rank on this device {_why(error, self._timeout_s)}"
            ) from error
        message: _Message = msgspec.msgpack.decode(data, type=_Message)
        return message

    def leave(self) -> None:
        """Unmap the buffers and disconnect. Idempotent."""
        self._pair = []
        self._link.close()

    end = leave


def _why(error: Exception, timeout_s: float) -> str:
    if isinstance(error, BlockingIOError):
        return f"did not answer within {timeout_s:g} s"
    return "has exited, or has given up the transfer"
