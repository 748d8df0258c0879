"""Listeners of gloo, which are closed to connections once the ranks of a group are connected.

gloo authenticates nobody. A connection costs it a descriptor until the process ends, and an accept
that finds none left ends the process (gloo/transport/tcp/listener.cc). The ranks connect while their
group is made. Afterwards a filter has the kernel drop packets for the listener; connections that
exist are not affected. gloo itself must keep the socket, since it polls it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

_LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
"""torch's variable: when it is set, ranks connect at their first collective."""
_MIN_BACKLOG = 2048
"""Gloo's listeners have longer queues than those that other threads may open meanwhile, unless the
system limits both.
"""
_LISTEN, _SO_ATTACH_FILTER = 10, 26
_BACKLOG_OF_TCP_INFO = struct.Struct("@28xI")
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A program of classic BPF: return 0 bytes of the packet."""


@contextlib.contextmanager
def closed_afterwards() -> Iterator[None]:
    """Close the listeners of gloo groups that are made in the block, after it."""
    before = _gloo_listeners()
    yield
    if os.environ.get(_LAZY_VARIABLE, "0") not in ("", "0"):
        return
    program = ctypes.create_string_buffer(_DROP_ALL)
    for inode, descriptor in _gloo_listeners().items():
        if inode not in before:
            with socket.socket(fileno=os.dup(descriptor)) as listener:
                listener.setsockopt(
                    socket.SOL_SOCKET,
                    _SO_ATTACH_FILTER,
                    struct.pack("HP", len(_DROP_ALL) // 8, ctypes.addressof(program)),
                )


def _gloo_listeners() -> dict[str, int]:
    """Return the descriptors of listening TCP sockets of gloo in this process, by inode."""
    found: dict[str, int] = {}
    if sys.platform != "linux":
        return found
    least = min(_MIN_BACKLOG, int(Path("/proc/sys/net/core/somaxconn").read_text()))
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inode = os.readlink(f"/proc/self/fd/{name}")
            if inode.startswith("socket:") and _backlog(int(name)) >= least:
                found[inode] = int(name)
    return found


def _backlog(descriptor: int) -> int:
    """Return the length of the queue of a listening TCP socket; 0 for others."""
    with socket.socket(fileno=os.dup(descriptor)) as each:
        if each.type != socket.SOCK_STREAM or each.family not in (socket.AF_INET, socket.AF_INET6):
            return 0
        info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
        return _BACKLOG_OF_TCP_INFO.unpack_from(info)[0] if info[0] == _LISTEN else 0
