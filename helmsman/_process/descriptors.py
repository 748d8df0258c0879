"""Looks at sockets by their descriptors, without taking part in them."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Iterator

_background = weakref.WeakSet[socket.socket]()


@contextlib.contextmanager
def socket_at(descriptor: int) -> Iterator[socket.socket]:
    """Yield the socket of a descriptor, which stays open.

    Raises:
        OSError: It is closed, or the descriptor of another kind of file.
    """
    copy = os.dup(descriptor)
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with found:
        yield found


def mark_background(link: socket.socket) -> None:
    """Note a connection whose data show no progress of a call, such as that of a monitor."""
    _background.add(link)


def background_descriptors() -> set[int]:
    """Return the descriptors of such connections that are open."""
    return {each.fileno() for each in list(_background)}
