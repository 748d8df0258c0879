"""Progress of this process's threads, tasks and connections, as the kernel counts it."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import os
import platform
import re
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

from helmsman._process.descriptors import background_descriptors, socket_at
from helmsman._process.guardian import proc_text
from helmsman.api.run_state import Progress

_THREADS, _DESCRIPTORS = "/proc/self/task", "/proc/self/fd"
_NUMBERS = {
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "connect": (42, 203),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "flock": (73, 32),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "poll": (7, None),
    "ppoll": (271, 73),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "select": (23, None),
    "pselect6": (270, 72),
    "futex": (202, 98),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "openat": (257, 56),
    "fsync": (74, 82),
    "pause": (34, None),
    "rt_sigtimedwait": (128, 137),
    "semtimedop": (220, 192),
}
"""System call that may block -> its number on x86_64 and on aarch64."""
_COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
_CALLS = {} if _COLUMN is None else {row[_COLUMN]: name for name, row in _NUMBERS.items()}
_WITHOUT_FILE = (
    *("futex", "nanosleep", "clock_nanosleep", "wait4", "waitid", "openat", "pause"),
    *("rt_sigtimedwait", "semtimedop", "select", "pselect6"),
)
_LIBRARY = re.compile(r"/asyncio/|/(?:site|dist)-packages/")
_POLLED = struct.Struct("=ihh")
_MOST_POLLED, _MOST_CONNECTIONS = 64, 512
_TCP = struct.Struct("=B43xIIII")
"""Fields of Linux's tcp_info: the state, and the milliseconds since data and acknowledgements were
sent and received.
"""
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_LISTENS = 10
_MOSTLY = 0.3
"""Share of a CPU."""
_SWITCHES = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)$", re.MULTILINE)
_COUNTED = re.compile(r"^(?:[rw]char|(?:read|write)_bytes): (\d+)$", re.MULTILINE)
_waiters = weakref.WeakKeyDictionary[asyncio.Task[Any], tuple[object, int]]()
"""Task -> the future that it waited for when it was seen last, and how often this has changed."""


def of_thread(thread: int) -> Progress:
    """Return the progress of a thread by its native id."""
    folder = f"{_THREADS}/{thread}"
    times = _cpu_times(folder)
    name, descriptors = _system_call(folder)
    waits_in = " ".join([name, *map(_describe, descriptors[:1])]).rstrip()
    quiet_s, num_wakes = _quiet_s(descriptors), 0
    if quiet_s is None and name in ("recvfrom", "recvmsg"):
        # The kernel counts no bytes of a local socket, but only they wake its reader.
        num_wakes = sum(map(int, _SWITCHES.findall(proc_text(f"{folder}/status"))))
    return Progress(
        number=thread,
        cpu_s=sum(times) if times is not None else None,
        moved_bytes=moved_by(folder),
        quiet_s=quiet_s,
        waits_in=waits_in,
        num_wakes=num_wakes,
    )


def of_task(task: asyncio.Task[Any], frames: Iterable[FrameType]) -> Progress:
    """Return the progress of a task with these frames.

    A task that was woken waits for another future than before.
    """
    waiter = getattr(task, "_fut_waiter", None)
    seen, num_wakes = _waiters.get(task, (waiter, 0))
    num_wakes += waiter is not seen
    _waiters[task] = waiter, num_wakes
    # Objects of the user may run code of theirs, and f_locals of a frame keeps them alive.
    frames = [each for each in frames if _LIBRARY.search(each.f_code.co_filename)]
    owners = [frame.f_locals.get("self") for frame in frames]
    transports = [getattr(e, name, None) for e in owners for name in ("transport", "_transport")]
    # Those of uvloop are no subclass of asyncio's.
    about = [getattr(each, "get_extra_info", None) for each in transports]
    sockets = [each("socket") for each in about if each is not None]
    descriptors = [each.fileno() for each in sockets if each is not None]
    return Progress(number=id(task), num_wakes=num_wakes, quiet_s=_quiet_s(descriptors))


def moved_bytes() -> int:
    """Return the bytes that the threads of this process read and wrote, without connections.

    Those of the calling thread, which reads /proc, are not counted.
    """
    own = str(threading.get_native_id())
    return sum(moved_by(f"{_THREADS}/{each}") for each in _names(_THREADS) if each != own)


def moved_by(folder: str) -> int:
    """Return the bytes that a process or thread, with this folder in /proc, read and wrote."""
    return sum(map(int, _COUNTED.findall(proc_text(f"{folder}/io"))))


def _names(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


class RunQueue:
    """Seconds in which threads waited for a CPU, of those that computed or waited for most of it.

    Other threads, such as Ray's, wait a little each time that they wake on a busy machine.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._seen: dict[str, tuple[float, float, float]] = {}
        self._lock = threading.Lock()

    def waited_s(self, processes: Iterable[str]) -> float:
        """Return the seconds since the first look at these processes, by their folders in /proc."""
        folders = [f"{each}/task" for each in processes]
        threads = [f"{folder}/{each}" for folder in folders for each in _names(folder)]
        with self._lock:
            before, self._seen = self._seen, {}
            for each in threads:
                if (times := _cpu_times(each)) is None:
                    continue
                now = self._seen[each] = time.monotonic(), *times
                passed_s, used_s, waited_s = map(operator.sub, now, before.get(each, now))
                if used_s + waited_s > _MOSTLY * passed_s:
                    self._waited_s += waited_s
            return self._waited_s


class Connections:
    """The connections that the code of engines opened: not older ones, and not incoming ones."""

    def __init__(self) -> None:
        self._older = {inode for _, inode in self._sockets()}

    def quiet_s(self) -> float | None:
        """Return the seconds since data moved on any of them; None if there is none."""
        found, listening = list[tuple[int, float]](), set[int]()
        for descriptor, inode in self._sockets():
            if inode in self._older or (info := _tcp_info(descriptor)) is None:
                continue
            state, port, quiet_s = info
            if state == _LISTENS:
                listening.add(port)
            else:
                found.append((port, quiet_s))
        return min((quiet_s for port, quiet_s in found if port not in listening), default=None)

    @staticmethod
    def _sockets() -> list[tuple[int, str]]:
        found, background = [], background_descriptors()
        for each in _names(_DESCRIPTORS)[:_MOST_CONNECTIONS]:
            with contextlib.suppress(OSError):  # closed meanwhile
                link = os.readlink(f"{_DESCRIPTORS}/{each}")
                if link.startswith("socket:") and int(each) not in background:
                    found.append((int(each), link))
        return found


def _cpu_times(thread: str) -> tuple[float, float] | None:
    """Return the seconds in which a thread ran, and in which it waited for a CPU."""
    words = proc_text(f"{thread}/schedstat").split()
    return (int(words[0]) / 1e9, int(words[1]) / 1e9) if len(words) > 1 else None


def _system_call(folder: str) -> tuple[str, list[int]]:
    """Return the name of the system call that a thread waits in, and its descriptors."""
    words = proc_text(f"{folder}/syscall").split()
    if len(words) < 3 or words[0] == "-1":
        return "", []
    name = _CALLS.get(int(words[0]), f"system call {words[0]}")
    first, second = int(words[1], 16), int(words[2], 16)
    if name in ("poll", "ppoll"):
        return name, _polled(first, min(second, _MOST_POLLED))
    if name.startswith("epoll"):
        text = proc_text(f"/proc/self/fdinfo/{first}")
        return name, [int(each) for each in re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)]
    return name, [] if name in _WITHOUT_FILE or name not in _NUMBERS else [first]


def _polled(address: int, number: int) -> list[int]:
    """Return the descriptors that a thread polls. Its memory may change meanwhile."""
    with contextlib.suppress(OSError), open("/proc/self/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        content = memory.read(number * _POLLED.size)
        if content is not None and len(content) == number * _POLLED.size:
            return [descriptor for descriptor, _, _ in _POLLED.iter_unpack(content)]
    return []


def _describe(descriptor: int) -> str:
    """Describe the file of a descriptor: its path, or the peer of a connection."""
    with contextlib.suppress(OSError):
        path = os.readlink(f"{_DESCRIPTORS}/{descriptor}")
        if not path.startswith("socket:"):
            return f"on {path}"
        with socket_at(descriptor) as opened:
            if opened.family in _INTERNET:
                host, port = opened.getpeername()[:2]
                return f"with {host}:{port}"
    return "on a socket"


def _quiet_s(descriptors: Iterable[int]) -> float | None:
    found = [info for each in descriptors if (info := _tcp_info(each)) is not None]
    return min((quiet_s for state, _, quiet_s in found if state != _LISTENS), default=None)


def _tcp_info(descriptor: int) -> tuple[int, int, float] | None:
    """Return the state of a TCP socket, its port, and the seconds since data moved."""
    with contextlib.suppress(OSError, struct.error), socket_at(descriptor) as opened:
        if opened.family in _INTERNET and opened.type == socket.SOCK_STREAM:
            info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP.size)
            state, sent_ms, _, received_ms, _ = _TCP.unpack(info)
            return state, opened.getsockname()[1], min(sent_ms, received_ms) / 1e3
    return None
