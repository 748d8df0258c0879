"""Large buffers between processes of one machine, packed into memory that the receiver maps.

A segment is a sealed memfd: the kernel frees it with the last descriptor and mapping, even if its
owner is killed. The receiver opens it through ``/proc`` and maps it privately, so both must share a
PID namespace and a user. The sender keeps it open until the receiver has attached.

Fresh pages cost several times as much as copying into used ones. A closed segment is therefore kept
for a while, and reused once no other process has it mapped: only then does the kernel grant a write
lease on its file. The content has a number, which changes when the segment is closed, so a late
receiver detects the change and never reads other data.

A child made by a bare ``fork`` keeps its copies of the descriptors, and their memory, until it
ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import io
import mmap
import os
import pickle
import secrets
import signal
import stat
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from helmsman._wire.memory import CopySpan, address_of, copy, libc, map_memory, populate
from helmsman.api.closing import Closing
from helmsman.api.errors import ProtocolError

HAS_SEGMENTS = sys.platform == "linux" and hasattr(os, "memfd_create")
"""Whether this system supports segments."""

_ALIGNMENT = 64
_HEADER_BYTES = _ALIGNMENT
"""Offset of the first buffer; before it is the number of the content, as 8 bytes."""
_NAME = "helmsman-"
_SMALLEST = 1 << 17
_SPARE_S = 60.0
"""Seconds that a closed segment is kept for reuse."""
_MOST_SPARES = 32
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not in the fcntl module


class SegmentLocation(msgspec.Struct, frozen=True):
    """Location of a segment for other processes of this machine and user."""

    pid: int
    """Pid of its owner."""
    fd: int
    """The owner's descriptor."""
    name: str
    """Unique name of the memfd, which reveals a recycled pid or descriptor."""
    number: int
    """Number of the content, which reveals a segment that was closed or reused meanwhile."""
    size: int
    """From its start to the end of the last buffer, in bytes."""
    offsets: list[int]
    """Start of each buffer, in bytes."""
    sizes: list[int]
    """Length of each buffer, in bytes."""


class ShmSegment(Closing):
    """Buffers packed into shared memory, at their owner; a context manager.

    ``close`` releases the memory, or keeps it for reuse.
    """

    def __init__(self, location: SegmentLocation, memory: _Memory) -> None:
        self.location = location
        self._memory: _Memory | None = memory

    @property
    def nbytes(self) -> int:
        return self.location.size

    def close(self) -> None:
        """Release the segment; idempotent. Receivers that have attached keep their mapping."""
        memory, self._memory = self._memory, None
        if memory is not None:
            spares.give(memory)


def pack(buffers: Sequence[Any]) -> ShmSegment:
    """Copy buffers into a segment.

    Args:
        buffers: One-dimensional contiguous buffers of bytes; none may be empty.

    Raises:
        OSError: The memory cannot be allocated.
    """
    views = [memoryview(buffer) for buffer in buffers]
    sizes = [view.nbytes for view in views]
    offsets, end = [], _HEADER_BYTES
    for each in sizes:
        offsets.append(end)
        end += -(-each // _ALIGNMENT) * _ALIGNMENT
    memory = spares.take(end)
    if memory is None:
        memory = _Memory.holding(views, offsets, end)
    else:
        try:
            memory.fill(views, offsets, end)
        except OSError:
            memory.close()
            raise
    location = SegmentLocation(
        pid=os.getpid(),
        fd=memory.fd,
        name=memory.name,
        number=memory.number,
        size=end,
        offsets=offsets,
        sizes=sizes,
    )
    return ShmSegment(location, memory)


def attach(location: SegmentLocation, *, populated: bool = True) -> list[memoryview]:
    """Map a segment of another process privately; the buffers keep the mapping alive.

    Args:
        location: The segment.
        populated: Map its pages now.

    Raises:
        ProtocolError: The segment no longer exists, or does not match its location.
    """
    path = f"/proc/{location.pid}/fd/{location.fd}"
    try:
        owner_uid = os.stat(f"/proc/{location.pid}").st_uid
        # NONBLOCK and NOCTTY: a reused descriptor number may now refer to a FIFO or terminal.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as exc:
        raise _lost(location, f"it can no longer be opened ({exc.strerror})") from exc
    try:
        _verify(location, fd, owner_uid)
        array = map_memory(fd, location.size, mmap.MAP_PRIVATE)
    finally:
        os.close(fd)
    address = ctypes.addressof(array)
    if ctypes.c_uint64.from_address(address).value != location.number:
        raise _lost(location, "its owner has released it")
    whole = pickle.PickleBuffer(array).raw()
    if populated:
        populate([whole])
    return [
        whole[offset : offset + size]
        for offset, size in zip(location.offsets, location.sizes, strict=True)
    ]


def can_attach(location: SegmentLocation) -> bool:
    """Whether this process shares a machine, PID namespace and user with the segment's owner."""
    try:
        attach(location)
    except (ProtocolError, OSError):
        return False
    return True


def can_reuse() -> bool:
    """Return whether this system can reuse segments; without reuse they are slower."""
    with pack([b"helmsman"]) as segment:
        return segment._memory is not None and segment._memory.capacity > 0


class _Memory:
    """A memfd that only this process can write to, by a mapping made before the memfd was sealed.

    Create it by ``holding``.
    """

    def __init__(
        self, name: str, file: io.FileIO, array: ctypes.Array[ctypes.c_char] | None, allocated: int
    ) -> None:
        self.name = name
        self.fd = file.fileno()
        self.number = 0
        self.idle_since = 0.0
        self._pid = os.getpid()
        self._file = file
        self._array = array
        self._allocated = allocated

    @classmethod
    def holding(cls, views: Sequence[memoryview], offsets: Sequence[int], end: int) -> _Memory:
        name = _NAME + secrets.token_hex(8)
        file = _opened_again(
            os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), os.O_RDWR
        )
        fd = file.fileno()
        try:
            # Written, and not copied to the mapping: this allocates and fills a page at once,
            # without a page fault and without zeroing it first.
            for view, offset in zip(views, offsets, strict=True):
                written = 0
                while written < view.nbytes:  # Linux writes at most 2 GiB at once
                    written += os.pwrite(fd, view[written:], offset + written)
            # Room for reuse; it takes no memory until it is written to.
            capacity = max(_SMALLEST, 1 << (end - 1).bit_length())
            os.ftruncate(fd, capacity)
            array = _sealed_mapping(fd, capacity)
            # The signal of a broken lease is ignored by default; SIGIO would kill the process.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        except BaseException:
            file.close()
            raise
        return cls(name, file, array, end)

    @property
    def capacity(self) -> int:
        """Bytes that fit; 0 if it cannot be reused."""
        return 0 if self._array is None or self._pid != os.getpid() else len(self._array)

    def void(self) -> None:
        """Invalidate the content for new receivers; those that have it mapped keep it."""
        if self.capacity:
            assert self._array is not None
            self.number += 1
            ctypes.c_uint64.from_buffer(self._array).value = self.number

    def fill(self, views: Sequence[memoryview], offsets: Sequence[int], end: int) -> None:
        assert self._array is not None
        if end > self._allocated:
            # Here a lack of memory is an error; in the mapping it would be a SIGBUS.
            os.posix_fallocate(self.fd, self._allocated, end - self._allocated)
            self._allocated = end
        address = ctypes.addressof(self._array)
        copy(
            [
                CopySpan(address + at, address_of(view), view.nbytes)
                for view, at in zip(views, offsets, strict=True)
            ]
        )

    def close(self) -> None:
        self._array = None
        self._file.close()


class _Spares:
    """Memory of closed segments for reuse; at most 1/32 of the machine's memory, and 1 GiB."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[_Memory] = []
        """Longest idle first."""

    @functools.cached_property
    def _limit(self) -> int:
        return min(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 32)

    def take(self, num_bytes: int) -> _Memory | None:
        """Return the smallest spare memory of enough bytes that no other process has mapped."""
        with self._lock:
            for memory in sorted(self._kept, key=lambda each: each.capacity):
                if (
                    memory.capacity >= num_bytes
                    and memory.capacity <= max(_SMALLEST, 4 * num_bytes)
                    and _is_exclusive(memory.fd)
                ):
                    self._kept.remove(memory)
                    return memory
        return None

    def give(self, memory: _Memory) -> None:
        """Keep memory for reuse; drops memory that is idle for too long or exceeds the limits."""
        now = memory.idle_since = time.monotonic()
        memory.void()
        with self._lock:
            if 0 < memory.capacity <= self._limit:
                self._kept.append(memory)
            else:
                memory.close()
            total = sum(each.capacity for each in self._kept)
            while self._kept and (
                total > self._limit
                or len(self._kept) > _MOST_SPARES
                or now - self._kept[0].idle_since > _SPARE_S
            ):
                oldest = self._kept.pop(0)
                total -= oldest.capacity
                oldest.close()

    def drop(self) -> None:
        with self._lock:
            while self._kept:
                self._kept.pop().close()

    def after_fork(self) -> None:
        """Drop the parent's memory in a child, which must not write to it."""
        self._lock = threading.Lock()
        self.drop()


spares = _Spares()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=spares.after_fork)


@functools.cache
def _leases_tell() -> bool:
    """Whether this kernel refuses leases on mapped memory; else reuse would corrupt readers."""
    with _opened_again(os.memfd_create(_NAME + "lease", os.MFD_CLOEXEC), os.O_RDWR) as file:
        os.ftruncate(file.fileno(), mmap.PAGESIZE)
        with _opened_again(os.dup(file.fileno()), os.O_RDONLY) as again:
            reader = map_memory(again.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE)
        refused = not _is_exclusive(file.fileno())
        del reader
        return refused and _is_exclusive(file.fileno())


def _opened_again(fd: int, flags: int) -> io.FileIO:
    """Reopen a file and close its descriptor: the kernel counts only opened files for leases."""
    try:
        return io.FileIO(
            os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC),
            "r" if flags == os.O_RDONLY else "r+",
        )
    finally:
        os.close(fd)


def _is_exclusive(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        if error.errno is None:  # raised by a signal handler
            raise
        return False
    return True


def _sealed_mapping(fd: int, size: int) -> ctypes.Array[ctypes.c_char] | None:
    """Return a writable mapping of a memfd, and seal the memfd against all other writes.

    Returns None where the kernel does not support that, or leases: the memfd can be used once then.
    """
    if _leases_tell() and _is_exclusive(fd):
        array = map_memory(fd, size, mmap.MAP_SHARED, owner=os.getpid())
        try:
            fcntl.fcntl(
                fd, fcntl.F_ADD_SEALS, _seals("F_SEAL_SHRINK", "F_SEAL_GROW") | _F_SEAL_FUTURE_WRITE
            )
        except OSError:
            del array
        else:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals("F_SEAL_SEAL"))
            # A child does not unmap it (see map_memory).
            libc().madvise(ctypes.addressof(array), size, mmap.MADV_DONTFORK)
            return array
    fcntl.fcntl(
        fd, fcntl.F_ADD_SEALS, _seals("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE", "F_SEAL_SEAL")
    )
    return None


def _seals(*names: str) -> int:
    # By name: the fcntl module has them on Linux only, and this module must import everywhere.
    return sum(getattr(fcntl, name) for name in names)


def _lost(location: SegmentLocation, reason: str) -> ProtocolError:
    return ProtocolError(
        f"the shared memory {location.name} ({location.size} bytes, descriptor {location.fd} of "
        f"process {location.pid}) cannot be attached: {reason}. Its process has ended, or has "
        "released it too early; see the log of that process.",
        location=location,
    )


def _verify(location: SegmentLocation, fd: int, owner_uid: int) -> None:
    """Verify that ``fd`` is the segment that the location names, made by this user, and sealed."""
    target, status = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd)
    if (
        target != f"/memfd:{location.name} (deleted)"
        or not location.name.startswith(_NAME)
        or not stat.S_ISREG(status.st_mode)
    ):
        raise _lost(location, f"the descriptor now is {target}")
    if {owner_uid, status.st_uid} != {os.geteuid()}:
        raise _lost(
            location,
            f"it belongs to user {status.st_uid}, its process to user {owner_uid}, this one to "
            f"{os.geteuid()}",
        )
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as exc:
        raise _lost(location, f"it is not a memfd ({exc.strerror})") from exc
    needed = _seals("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW")
    if seals & needed != needed or not seals & (_seals("F_SEAL_WRITE") | _F_SEAL_FUTURE_WRITE):
        raise _lost(location, "it is not sealed, so it could change while it is read")
    ends = [offset + size for offset, size in zip(location.offsets, location.sizes, strict=True)]
    if (
        not location.offsets
        or not _HEADER_BYTES <= location.size <= status.st_size
        or min(location.offsets) < _HEADER_BYTES
        or min(location.sizes) < 0
        or max(ends) > location.size
    ):
        raise _lost(
            location,
            f"the buffers at {location.offsets} do not fit into its {status.st_size} bytes",
        )
