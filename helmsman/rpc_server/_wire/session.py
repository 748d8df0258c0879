"""The state by which the messages of a connection outlive it: each arrives once and in order, also after a reconnection.

    connector                                           listener
    token, number of messages received  ------->                     -1 for the number opens a new session
                                        <-------   number of messages received, or -1 where the token is not known
    messages that the other end lacks   <------>   messages that the other end lacks
    then each message: length, number of messages received, body

Both ends keep each message until the other end has confirmed it. Every message confirms all that were received before it; one
without a body does nothing else and is not counted.
"""

from __future__ import annotations

import collections
import struct

from helmsman.api.errors import ProtocolError
from helmsman.rpc_server._wire.frames import MAX_FRAME_BYTES, require_size
from helmsman.rpc_server._wire.payload import INLINE_BYTES
from helmsman.rpc_server._wire.segments import ShmSegment

HELLO = struct.Struct("!16sq")
"""First message of a connector: the session's token, and how many messages it has received; -1 for a new session."""
WELCOME = struct.Struct("!q")
"""The answer: how many messages the listener has received; -1 where it does not know the session."""

_LENGTH_AND_COUNT = struct.Struct("!iq")
_COUNT = struct.Struct("!q")
_CONFIRM_EACH = 64


class Session:
    """One end of a session.

    The caller serializes the methods that make bytes, and writes the bytes in that order. It serializes ``take`` and ``taken``.
    """

    def __init__(self) -> None:
        self.num_received = 0
        self._num_told = 0
        """Messages whose receipt was confirmed by what was written last."""
        self._num_confirmed = 0
        self._kept: collections.deque[tuple[bytes, ShmSegment | None]] = collections.deque()
        """Messages that are not confirmed, and the segment that belongs to each."""

    def keep(self, body: bytes, segment: ShmSegment | None = None) -> bytes:
        """Keep a message, and its segment open, until it is confirmed; returns the bytes to write.

        Raises: ProtocolError for one that is too large, which is not kept.
        """
        size = len(body) + _COUNT.size
        if size > MAX_FRAME_BYTES:
            if segment is not None:
                segment.close()
            require_size(size)
        self._kept.append((body, segment))
        self._num_told = self.num_received
        return _LENGTH_AND_COUNT.pack(size, self._num_told) + body

    def take(self, message: bytes) -> memoryview:
        """The body of a message from the peer, without its length; empty for a mere confirmation. Raises ProtocolError."""
        if len(message) < _COUNT.size:
            raise ProtocolError(f"a message of {len(message)} bytes came, expected at least {_COUNT.size}")
        self._confirm(_COUNT.unpack_from(message)[0])
        return memoryview(message)[_COUNT.size :]

    def taken(self, *, is_large: bool = False) -> bool:
        """Count a message that was taken; returns whether a confirmation is due, which no other message carries in time.

        Args:
            is_large: whether the peer keeps much memory for it.
        """
        self.num_received += 1
        return is_large or self.num_received - self._num_told >= _CONFIRM_EACH

    def confirmation(self) -> bytes:
        """The bytes of a message that only confirms."""
        self._num_told = self.num_received
        return _LENGTH_AND_COUNT.pack(_COUNT.size, self._num_told)

    def resume(self, num_received: int) -> list[bytes]:
        """The bytes that a new connection begins with, at the other end of which so many messages were received.

        Raises: ProtocolError where that cannot be.
        """
        self._confirm(num_received)
        return [_LENGTH_AND_COUNT.pack(len(body) + _COUNT.size, self.num_received) + body for body, _ in self._kept]

    def close(self) -> None:
        """Forget all messages."""
        self._confirm(self._num_confirmed + len(self._kept))

    def _confirm(self, num_received: int) -> None:
        num_new = num_received - self._num_confirmed
        if not 0 <= num_new <= len(self._kept):
            raise ProtocolError(
                f"the peer says that it has received {num_received} messages, expected {self._num_confirmed} to "
                f"{self._num_confirmed + len(self._kept)}"
            )
        for _ in range(num_new):
            _, segment = self._kept.popleft()
            if segment is not None:
                segment.close()
        self._num_confirmed = num_received


def is_large(body: memoryview, *, has_segment: bool) -> bool:
    """Whether the sender of a message keeps much memory until it is confirmed."""
    return has_segment or len(body) >= INLINE_BYTES
