"""A worker's heartbeat: a shared page that others read while the worker cannot answer.

The worker updates the page every BEAT_S with a beat and a description of itself, and records the
start and the end of each call. The controller, or the worker's observer.py on another machine,
calls observe(); read() decodes the result.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import functools
import math
import mmap
import os
import re
import resource
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from helmsman._process.guardian import proc_text, stat_fields

BEAT_S = 0.2
"""Seconds between beats: short enough to distinguish an interpreter stuck for a second from a slow
one.
"""

PAGE_BYTES = 8192
_BEAT = struct.Struct("=dB")
"""time.monotonic() of the last beat, and the slot of the last description."""
_CALL_NAME_BYTES = 110
_CALL = struct.Struct(f"=QdH{_CALL_NAME_BYTES}sQ")
"""Number, time.monotonic() at the begin (0 if none runs), length of the name, name, and the number
again. The two numbers differ if the record was read, or the process stopped, during a write.
"""
_CALL_SINCE_AT = 8
_SINCE = struct.Struct("=d")
_LENGTH = struct.Struct("=I")
_THREAD_AT, _LOOP_AT, _SLOTS_AT = 64, 256, 512
_SLOT_BYTES = (PAGE_BYTES - _SLOTS_AT) // 2
_KERNEL = struct.Struct("=ddQc")
"""time.monotonic() of the observation, CPU seconds, resident bytes, state."""
_NAME = "helmsman_pulse-"
_THREAD = re.compile(
    r"^State:\s*(\S).*^voluntary_ctxt_switches:\s*(\d+)$", re.MULTILINE | re.DOTALL
)
_LOOK_S = 0.02
_LATE_S = 0.3
"""A beat that is later than this may show that the process was stopped."""
_LEAST_POLLS = 200.0
"""A thread that waits for the interpreter lock polls it more often than this in a second."""
_RECENT_S = 30.0
_pauses = collections.deque[tuple[float, float]](maxlen=256)
"""(end, length) of the times in which this process was stopped, on time.monotonic()."""


def recent_pauses_s() -> list[float]:
    """Return the lengths of the recent times in which this process was stopped."""
    since = time.monotonic() - _RECENT_S
    return [length_s for end, length_s in list(_pauses) if end > since]


def shown_name(name: str) -> bytes:
    """Return the text of a call's name in the page."""
    return name.encode()[:_CALL_NAME_BYTES]


class CallRecord:
    """Record, in a page, of the call that began most recently."""

    def __init__(self, page: mmap.mmap, offset: int) -> None:
        # Bound once, since every call uses them.
        self._note = functools.partial(_CALL.pack_into, page, offset)
        self._note_end = functools.partial(_SINCE.pack_into, page, offset + _CALL_SINCE_AT, 0.0)
        self._number = 0

    def begun(self, text: bytes, since: float) -> None:
        """Show a call; ``text`` is the result of ``shown_name``."""
        number = self._number = self._number + 1
        self._note(number, since, len(text), text, number)

    def ended(self) -> None:
        self._note_end()


class _ThreadTimes:
    """Times in which the calling thread could run, and yields of its processor."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.num_yields, self.runnable_s = 0, math.inf  # where the kernel does not count
        with contextlib.suppress(OSError), open("/proc/thread-self/schedstat", "rb") as file:
            self.runnable_s = int(file.read().split()[1]) / 1e9
            self.num_yields = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

    def stopped_s(self, earlier: _ThreadTimes) -> float:
        """Return how long the process was stopped since then, of a wait of BEAT_S; 0 if it ran.

        The thread is late as well if it waits for a processor, or for the interpreter lock, which
        it polls every microsecond (share_interpreter).
        """
        late_s = self.at - earlier.at - BEAT_S
        has_polled = self.num_yields - earlier.num_yields > _LEAST_POLLS * late_s
        if has_polled or math.isinf(self.runnable_s):
            return 0.0
        stopped_s = late_s - (self.runnable_s - earlier.runnable_s)
        return stopped_s if stopped_s > _LATE_S else 0.0


class Pulse:
    """The heartbeat page of this process.

    Args:
        tag: Readers find the page by this tag, which is unique to the worker.
    """

    def __init__(self, tag: str) -> None:
        self.fd = -1
        """Descriptor of the page; -1 on a system where no other process can read it."""
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create(_NAME + tag, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, PAGE_BYTES)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._page = mmap.mmap(self.fd, PAGE_BYTES)
        self._slot = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.thread_call = CallRecord(self._page, _THREAD_AT)
        """The call on the engine thread."""
        self.loop_call = CallRecord(self._page, _LOOP_AT)
        """The call on the event loop that began last; it may have ended."""

    def start(self, describe: Callable[[], bytes]) -> None:
        """Beat on a thread of its own until this process ends.

        Args:
            describe: Returns the worker's description; one of more than 3.8 kB is not stored.

        Raises:
            RuntimeError: The thread cannot be started.
        """
        self._beat(describe)
        self._thread = threading.Thread(
            target=self._keep_beating, args=(describe,), name="helmsman-pulse", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop beating, and close the page. Idempotent."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(1.0)
            if not self._thread.is_alive():
                self._page.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _keep_beating(self, describe: Callable[[], bytes]) -> None:
        before = _ThreadTimes()
        while not self._stopped.wait(BEAT_S):
            now = _ThreadTimes()
            if stopped_s := now.stopped_s(before):
                _pauses.append((now.at, stopped_s))
            self._beat(describe)
            before = _ThreadTimes()

    def _beat(self, describe: Callable[[], bytes]) -> None:
        description = describe()
        if len(description) <= _SLOT_BYTES - _LENGTH.size:
            # The other slot stays intact if this process is stopped during the write.
            slot = 1 - self._slot
            offset = _SLOTS_AT + slot * _SLOT_BYTES
            _LENGTH.pack_into(self._page, offset, len(description))
            self._page[offset + _LENGTH.size : offset + _LENGTH.size + len(description)] = (
                description
            )
            self._slot = slot
        _BEAT.pack_into(self._page, 0, time.monotonic(), self._slot)


class SeenCall(NamedTuple):
    name: str
    """'engine.method'; '' if none runs."""
    running_s: float
    """Seconds since it began."""


class Seen(NamedTuple):
    stuck_s: float
    """Seconds since the last beat."""
    state: str
    """State of the process in /proc: R, S, D, T, ..."""
    cpu_s: float
    rss_bytes: int
    description: bytes
    """The worker's description of itself at the last beat."""
    thread_call: SeenCall | None
    """The call on the engine thread; None if it cannot be read."""
    loop_call: SeenCall | None
    """The call that began last on the event loop; None if it cannot be read."""


def memfds_of(pid: int) -> Iterator[tuple[str, str]]:
    """Yield (name, path) of the anonymous files of a process; none if it is not accessible."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for each in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed meanwhile
                kind, _, name = os.readlink(f"{folder}/{each}").partition(":")
                if kind == "/memfd":
                    yield name.removesuffix(" (deleted)"), f"{folder}/{each}"


def find_page(pid: int, tag: str) -> mmap.mmap | None:
    """Map the page of another process; None if it is not accessible, such as on another machine."""
    run_id, _, worker_id = tag.partition("/")
    return pages_of(pid, run_id).get(worker_id)


def pages_of(pid: int, run_id: str) -> dict[str, mmap.mmap]:
    """Map the pages of a run's process by worker id or SCRIPT; empty if it is not accessible."""
    found = {}
    for name, path in memfds_of(pid):
        if name.startswith(f"{_NAME}{run_id}/"):
            with contextlib.suppress(OSError):  # closed meanwhile
                page = map_page(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                found[name.removeprefix(f"{_NAME}{run_id}/")] = page
    return found


def map_page(fd: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def observe(page: mmap.mmap, pid: int) -> bytes:
    """Observe a process on this machine for about 20 ms; b'' if it has ended."""
    fields = stat_fields(pid)
    if not fields or fields[0] in b"ZX":
        return b""
    state = fields[0]
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    rss_bytes = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    if state in b"SR":  # state of the main thread only
        state = _state_of_threads(pid)
    return _KERNEL.pack(time.monotonic(), cpu_s, rss_bytes, state) + page[:]


def _state_of_threads(pid: int) -> bytes:
    """Return R if a thread computes, else D if one waits for a disk, else S.

    Threads that wait for the interpreter lock do not count. They poll it every microsecond
    (share_interpreter), so each yields its processor many times within ``_LOOK_S``, while a thread
    that computes never does.
    """
    threads: list[str] = []
    with contextlib.suppress(OSError):  # the process has ended
        threads = os.listdir(f"/proc/{pid}/task")
    before = _look_at(f"/proc/{pid}/task/{thread}/status" for thread in threads)
    running = [path for path, (state, _) in before.items() if state == "R"]
    if running:
        time.sleep(_LOOK_S)
        if before.items() & _look_at(running).items():
            return b"R"
    return b"D" if any(state == "D" for state, _ in before.values()) else b"S"


def _look_at(paths: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the state of threads, and how often each has yielded its processor voluntarily."""
    found = {path: _THREAD.search(proc_text(path)) for path in paths}
    return {path: (each[1], each[2]) for path, each in found.items() if each is not None}


def read(observation: bytes) -> Seen | None:
    if len(observation) != _KERNEL.size + PAGE_BYTES:
        return None
    now, cpu_s, rss_bytes, state = _KERNEL.unpack_from(observation)
    page = observation[_KERNEL.size :]
    beat, slot = _BEAT.unpack_from(page)
    offset = _SLOTS_AT + slot * _SLOT_BYTES
    (length,) = _LENGTH.unpack_from(page, offset)
    return Seen(
        stuck_s=max(0.0, now - beat),
        state=state.decode(),
        cpu_s=cpu_s,
        rss_bytes=rss_bytes,
        description=page[offset + _LENGTH.size : offset + _LENGTH.size + length],
        thread_call=_call(page, _THREAD_AT, now),
        loop_call=_call(page, _LOOP_AT, now),
    )


def _call(page: bytes, offset: int, now: float) -> SeenCall | None:
    number, since, length, name, again = _CALL.unpack_from(page, offset)
    if number != again:
        return None
    return (
        SeenCall(name[:length].decode(errors="replace"), max(0.0, now - since))
        if since
        else SeenCall("", 0.0)
    )
