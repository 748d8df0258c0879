"""Waits for sockets that may pass from one thread to another, without a wake-up for the change."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import weakref
from collections.abc import Callable
from typing import Protocol


class HasFileno(Protocol):
    """A socket, or what has one."""

    def fileno(self) -> int: ...


class Bell:
    """Wakes one thread that waits for descriptors, of which this is one."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def wait_with(self, sock: HasFileno, limit_s: float | None = None) -> bool:
        """Wait until a socket is readable, has ended, or the bell rings.

        Args:
            sock: The socket.
            limit_s: Limit in seconds; None for none.

        Returns:
            Whether the socket is ready.
        """
        descriptor = sock.fileno()
        if descriptor < 0:  # closed by another thread, which rings
            return False
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(self._descriptor, select.POLLIN)
        ready = [each for each, _ in poll.poll(None if limit_s is None else limit_s * 1000)]
        if self._descriptor in ready:
            self.silence()
            ready.remove(self._descriptor)
        return bool(ready)


_free: list[Bell] = []
"""Bells that no thread uses."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free.clear)  # a child would share them with its parent


def take_bell() -> Bell | None:
    """Return a bell for the calling thread, to ``give_back``.

    Returns None if no descriptor is left, or if this system has no bells.
    """
    with contextlib.suppress(IndexError):
        return _free.pop()
    with contextlib.suppress(OSError, AttributeError):
        return Bell()
    return None


def give_back(bell: Bell | None) -> None:
    """Take back the bell of a thread that no longer waits."""
    if bell is not None:
        _free.append(bell)


class Readers:
    """Functions that an event loop calls while their sockets are readable.

    Unlike the readers of the loop itself, any thread can turn them off and on, because it takes one
    system call on an epoll object that the loop watches.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._epoll = select.epoll()
        self._functions: dict[int, Callable[[], None]] = {}
        loop.add_reader(self._epoll, self._run)

    def add(self, sock: socket.socket, function: Callable[[], None]) -> None:
        self._functions[sock.fileno()] = function
        self._epoll.register(sock, select.EPOLLIN)

    def turn(self, sock: socket.socket, *, on: bool) -> None:
        """Turn a reader on or off; while it is off, it is called once the connection has ended."""
        self._epoll.modify(sock, select.EPOLLIN if on else select.EPOLLRDHUP)

    def remove(self, sock: socket.socket) -> None:
        del self._functions[sock.fileno()]
        self._epoll.unregister(sock)

    def _run(self) -> None:
        for descriptor, _ in self._epoll.poll(0):
            function = self._functions.get(descriptor)
            if function is not None:  # else an earlier function has removed it
                function()


_readers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Readers] = (
    weakref.WeakKeyDictionary()
)


def readers_of(loop: asyncio.AbstractEventLoop) -> Readers:
    """Return the readers of a loop; called on that loop.

    Raises:
        OSError: No descriptor is left.
    """
    readers = _readers.get(loop)
    if readers is None:
        readers = _readers[loop] = Readers(loop)
    return readers


Leader = Bell | Readers
"""Reads a socket in place of the event loop to which it belongs: a thread, or another loop."""
