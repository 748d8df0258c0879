"""The session of a controller and a worker, which preserves messages across reconnections.

A connection begins with a resumption of its session. Each message then arrives once and in order,
even across reconnections:

    connector                                           listener
    token, attempt, messages received   ------->                     attempt 0 opens a new session
                                        <-------   number of messages received, or -1: unknown token
    messages that the other end lacks   <------>   messages that the other end lacks
    then each message: length, number of messages received, body

Both ends keep each message until the other end has confirmed it. Every message confirms all
messages received before it; one without a body does nothing else and is not counted. An attempt
that arrives after a later one is refused.
"""

from __future__ import annotations

import collections
import struct

from helmsman._wire.segments import ShmSegment
from helmsman._wire.wire import INLINE_BYTES, MAX_FRAME_BYTES, WirePayload, require_size
from helmsman.api.errors import ProtocolError

HELLO = struct.Struct("!16sqq")
"""First message of a connector: session token, attempt number, number of messages received."""
WELCOME = struct.Struct("!q")
"""The answer: number of messages that the listener has received; -1 for an unknown session."""

_COUNTED = struct.Struct("!iq")
_COUNT = struct.Struct("!q")
_CONFIRM_EACH = 64


class Session:
    """One end of a session.

    The caller serializes the methods that return bytes, and writes the bytes in that order. It also
    serializes ``take`` and ``taken``.
    """

    def __init__(self) -> None:
        self.num_received = 0
        self._num_told = 0
        """Number of messages whose receipt the last write confirmed."""
        self._num_confirmed = 0
        self._kept: collections.deque[tuple[bytes, ShmSegment | None]] = collections.deque()
        """Unconfirmed messages, with their segments."""
        self._num_bytes = self._num_confirmed_bytes = 0
        """Separate counts, since ``keep`` and ``take`` may run on different threads."""

    @property
    def num_kept_bytes(self) -> int:
        return self._num_bytes - self._num_confirmed_bytes

    def keep(self, body: bytes, segment: ShmSegment | None = None) -> bytes:
        """Keep a message, and its segment open, until it is confirmed.

        Returns:
            The bytes to write.

        Raises:
            ProtocolError: The message is too large. It is not kept.
        """
        size = len(body) + _COUNT.size
        if size > MAX_FRAME_BYTES:
            if segment is not None:
                segment.close()
            require_size(size)
        self._num_bytes += size if segment is None else size + segment.nbytes
        self._kept.append((body, segment))
        self._num_told = self.num_received
        return _COUNTED.pack(size, self._num_told) + body

    def take(self, message: bytes) -> memoryview:
        """Return the body of a message from the peer; empty for a mere confirmation.

        Args:
            message: The message without its length.

        Raises:
            ProtocolError: The message is malformed.
        """
        if len(message) < _COUNT.size:
            raise ProtocolError(
                f"received a message of {len(message)} bytes, expected at least {_COUNT.size}"
            )
        (num_received,) = _COUNT.unpack_from(message)
        if num_received != self._num_confirmed:
            self._confirm(num_received)
        return memoryview(message)[_COUNT.size :]

    def taken(self, num_bytes: int, wire: WirePayload | None) -> bool:
        """Count a received message; returns whether it must be confirmed by a separate message."""
        self.num_received += 1
        if num_bytes >= INLINE_BYTES or (wire is not None and wire.segment is not None):
            return True
        return self.num_received - self._num_told >= _CONFIRM_EACH

    def confirmation(self) -> bytes:
        self._num_told = self.num_received
        return _COUNTED.pack(_COUNT.size, self._num_told)

    def resume(self, num_received: int) -> list[bytes]:
        """Return the bytes that a new connection begins with.

        Args:
            num_received: Number of messages that the other end has received.

        Raises:
            ProtocolError: The number contradicts the messages sent and confirmed.
        """
        self._confirm(num_received)
        return [
            _COUNTED.pack(len(body) + _COUNT.size, self.num_received) + body
            for body, _ in self._kept
        ]

    def close(self) -> None:
        self._confirm(self._num_confirmed + len(self._kept))

    def _confirm(self, num_received: int) -> None:
        num_new = num_received - self._num_confirmed
        if not 0 <= num_new <= len(self._kept):
            raise ProtocolError(
                f"the peer reports {num_received} messages received, expected "
                f"{self._num_confirmed} to {self._num_confirmed + len(self._kept)}"
            )
        for _ in range(num_new):
            body, segment = self._kept.popleft()
            self._num_confirmed_bytes += len(body) + _COUNT.size
            if segment is not None:
                self._num_confirmed_bytes += segment.nbytes
                segment.close()
        self._num_confirmed = num_received
