"""Listening sockets of processes, from /proc."""

from __future__ import annotations

import contextlib
import ipaddress
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_LISTENING_TCP, _LISTENING_UNIX = "0A", "00010000"


class Listener(NamedTuple):
    pid: int
    family: str
    """'tcp' or 'unix'."""
    address: str
    """Numeric address, path, or '@' and the name in the abstract namespace."""
    port: int = 0


def family_of(pid: int) -> list[int]:
    """Return a process and its descendants."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def listeners_of(pids: Iterable[int]) -> set[Listener]:
    """Return the listening stream and packet sockets of these processes, one for each address."""
    found: dict[str, Listener] = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            inodes = set(_inodes(pid))
            for inode, listener in (*_tcp(pid), *_unix(pid)):
                if inode in inodes:  # forked processes may have it, too
                    found.setdefault(inode, listener)
    return set(found.values())


def _inodes(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            if target.startswith("socket:["):
                yield target[len("socket:[") : -1]


def _tcp(pid: int) -> Iterator[tuple[str, Listener]]:
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == _LISTENING_TCP:
                address, port = parts[1].split(":")
                words = struct.pack(f"={len(address) // 8}I", *_words(address))
                host = str(ipaddress.ip_address(words))
                yield parts[9], Listener(pid, "tcp", host, int(port, 16))


def _words(text: str) -> list[int]:
    return [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]


def _unix(pid: int) -> Iterator[tuple[str, Listener]]:
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        parts = line.split(maxsplit=7)
        if parts[3] == _LISTENING_UNIX:
            yield parts[6], Listener(pid, "unix", parts[7] if len(parts) > 7 else "")
