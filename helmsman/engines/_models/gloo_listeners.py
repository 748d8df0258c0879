"""Listeners of gloo, which are closed to connections once the ranks of a group are connected.

gloo accepts every process. A connection costs it a descriptor until its own process ends, and an
accept that finds none left ends that process (gloo/transport/tcp/listener.cc). The ranks connect
while their group is made. Afterwards a filter has the kernel drop all packets for the listener;
connections that exist are not affected. The socket stays open, because gloo polls it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from helmsman._process.descriptors import socket_at
from helmsman.api.platforms import current_platform

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


_lock = threading.Lock()
_before: set[str] = set()
"""Listeners that existed when the first of the present blocks began."""
_num_blocks = 0


@contextlib.contextmanager
def closed_afterwards() -> Iterator[None]:
    """Close the listeners of gloo groups that are made in the block, after it.

    Threads of this process may be members of one group, so that the last block closes them all.
    """
    global _before, _num_blocks
    with _lock:
        if _num_blocks == 0:
            _before = set(_gloo_listeners())
        _num_blocks += 1
    try:
        yield
    finally:
        with _lock:
            _num_blocks -= 1
            if _num_blocks == 0 and os.environ.get(_LAZY_VARIABLE, "0") in ("", "0"):
                for inode, descriptor in _gloo_listeners().items():
                    if inode not in _before:
                        _drop_packets(descriptor)


def close_listeners() -> None:
    """Close all listeners of gloo in this process, in which no group is being made.

    Those of a process that uses NCCL stay open: they cannot be told apart, and NCCL connects later.
    """
    if current_platform.communication_backend == "gloo":
        for descriptor in _gloo_listeners().values():
            _drop_packets(descriptor)


def _drop_packets(descriptor: int) -> None:
    program = ctypes.create_string_buffer(_DROP_ALL)
    option = struct.pack("HP", 1, ctypes.addressof(program))
    with socket_at(descriptor) as listener:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)


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
    with socket_at(descriptor) as each:
        if each.type != socket.SOCK_STREAM or each.family not in (socket.AF_INET, socket.AF_INET6):
            return 0
        info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
        return _BACKLOG_OF_TCP_INFO.unpack_from(info)[0] if info[0] == _LISTEN else 0
