"""Large buffers between processes of one machine: packed into memory that the receiver maps.

A segment is a sealed memfd: the kernel frees it with the last descriptor and mapping, however its
owner dies. The receiver opens it through ``/proc`` and maps it privately, so both share a PID
namespace and a user. The sender keeps it open until the receiver has attached.

Fresh pages cost several times what copying into used ones does, so a closed segment is kept for a
while and used again, once no other process has it mapped: the kernel grants a write lease on a file
only then. The content has a number, which changes when the segment is closed, so a receiver that is
too late finds another number instead of other data.

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

from helmsman.api.closing import Closing
from helmsman.api.errors import ProtocolError
from helmsman.rpc_server._wire.memory import Span, address_of, copy, libc, map_memory, populate

HAS_SEGMENTS = sys.platform == "linux" and hasattr(os, "memfd_create")
"""Whether this machine has segments."""

_ALIGNMENT = 64
_HEADER_BYTES = _ALIGNMENT
"""Before the first buffer: the number of what is in the segment, as 8 bytes."""
_NAME = "helmsman-"
_SMALLEST = 1 << 17
_SPARE_S = 60.0
"""How long a closed segment is kept for the next."""
_MOST_SPARES = 32
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not in the fcntl module


class SegmentLocation(msgspec.Struct, frozen=True):
    """Where another process of this machine and user finds a segment."""

    pid: int
    """Its owner."""
    fd: int
    """The owner's descriptor."""
    name: str
    """Name of the memfd, which no other has: a recycled pid or descriptor is noticed."""
    number: int
    """Of what is in it: a segment that was closed meanwhile, and may be in use for something else,
    is noticed.
    """
    size: int
    """From its start to the end of the last buffer, in bytes."""
    offsets: list[int]
    """Start of each buffer, in bytes."""
    sizes: list[int]
    """Length of each buffer, in bytes."""


class ShmSegment(Closing):
    """Buffers packed into shared memory, as their owner holds them. A context manager; ``close``
    gives the memory back, or keeps it for a segment to come.
    """

    def __init__(self, location: SegmentLocation, memory: _Memory) -> None:
        self.location = location
        self._memory: _Memory | None = memory

    @property
    def nbytes(self) -> int:
        return self.location.size

    def close(self) -> None:
        """Let go of the segment; idempotent. Receivers that have attached keep theirs."""
        memory, self._memory = self._memory, None
        if memory is not None:
            spares.give(memory)


def pack(buffers: Sequence[Any]) -> ShmSegment:
    """Copy one-dimensional contiguous buffers of bytes, none of them empty, into a segment. Raises
    OSError.
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
    """Map a segment of another process privately; its buffers keep the mapping alive. Raises
    ProtocolError where it is gone.
    """
    path = f"/proc/{location.pid}/fd/{location.fd}"
    try:
        owner_uid = os.stat(f"/proc/{location.pid}").st_uid
        # NONBLOCK and NOCTTY: whatever else this number has become by now must not make us wait.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as exc:
        raise _lost(location, f"it cannot be opened any more ({exc.strerror})") from exc
    try:
        _verify(location, fd, owner_uid)
        array = map_memory(fd, location.size, mmap.MAP_PRIVATE)
    finally:
        os.close(fd)
    address = ctypes.addressof(array)
    if ctypes.c_uint64.from_address(address).value != location.number:
        raise _lost(location, "its owner has let go of it")
    whole = pickle.PickleBuffer(array).raw()
    if populated:
        populate([whole])
    return [
        whole[offset : offset + size]
        for offset, size in zip(location.offsets, location.sizes, strict=True)
    ]


def can_attach(location: SegmentLocation) -> bool:
    """Whether this process can map a segment, so whether it shares a machine, PID namespace and
    user with the owner.
    """
    try:
        attach(location)
    except (ProtocolError, OSError):
        return False
    return True


def can_reuse() -> bool:
    """Whether this system lets segments be used again; they are slower where it does not."""
    with pack([b"helmsman"]) as segment:
        return segment._memory is not None and segment._memory.capacity > 0


class _Memory:
    """A memfd that this process alone can write to: by a mapping that was made before it was
    sealed.

    Use ``holding``.
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
            # Written and not copied to the mapping: a page is allocated and filled at once, without
            # a fault and without being zeroed before.
            for view, offset in zip(views, offsets, strict=True):
                written = 0
                while written < view.nbytes:  # Linux writes at most 2 GiB at once
                    written += os.pwrite(fd, view[written:], offset + written)
            # Room for what may come next; it takes no memory until it is written to.
            capacity = max(_SMALLEST, 1 << (end - 1).bit_length())
            os.ftruncate(fd, capacity)
            array = _sealed_mapping(fd, capacity)
            # what a broken lease would send is ignored then, and not deadly
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        except BaseException:
            file.close()
            raise
        return cls(name, file, array, end)

    @property
    def capacity(self) -> int:
        """Bytes that fit; 0 when it cannot be used again."""
        return 0 if self._array is None or self._pid != os.getpid() else len(self._array)

    def void(self) -> None:
        """Let nobody find any more what is in it; those that have it mapped keep it."""
        if self.capacity:
            assert self._array is not None
            self.number += 1
            ctypes.c_uint64.from_buffer(self._array).value = self.number

    def fill(self, views: Sequence[memoryview], offsets: Sequence[int], end: int) -> None:
        assert self._array is not None
        if end > self._allocated:
            # here a lack of memory is an error; in the mapping it would be a signal
            os.posix_fallocate(self.fd, self._allocated, end - self._allocated)
            self._allocated = end
        address = ctypes.addressof(self._array)
        copy(
            [
                Span(address + at, address_of(view), view.nbytes)
                for view, at in zip(views, offsets, strict=True)
            ]
        )

    def close(self) -> None:
        self._array = None
        self._file.close()


class _Spares:
    """Memory of closed segments, which the next may use. At most a thirty-second of the machine's,
    and 1 GiB.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[_Memory] = []
        """The longest idle first."""

    @functools.cached_property
    def _limit(self) -> int:
        return min(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 32)

    def take(self, num_bytes: int) -> _Memory | None:
        """The smallest spare memory of so many bytes that nobody has mapped any more."""
        with self._lock:
            for memory in sorted(self._kept, key=lambda each: each.capacity):
                if (
                    memory.capacity >= num_bytes
                    and memory.capacity <= max(_SMALLEST, 4 * num_bytes)
                    and _nobody_else_has_it_open(memory.fd)
                ):
                    self._kept.remove(memory)
                    return memory
        return None

    def give(self, memory: _Memory) -> None:
        """Keep memory, at the price of what was idle for long, or lies there too much."""
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
        """In the child: the parent's memory is not its own to write to."""
        self._lock = threading.Lock()
        self.drop()


spares = _Spares()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=spares.after_fork)


@functools.cache
def _leases_tell() -> bool:
    """Whether this kernel refuses a lease on what somebody has mapped; one that does not would let
    data change below him.
    """
    with _opened_again(os.memfd_create(_NAME + "lease", os.MFD_CLOEXEC), os.O_RDWR) as file:
        os.ftruncate(file.fileno(), mmap.PAGESIZE)
        with _opened_again(os.dup(file.fileno()), os.O_RDONLY) as again:
            reader = map_memory(again.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE)
        refused = not _nobody_else_has_it_open(file.fileno())
        del reader
        return refused and _nobody_else_has_it_open(file.fileno())


def _opened_again(fd: int, flags: int) -> io.FileIO:
    """The file of a descriptor, which is closed, opened once more: for leases the kernel counts
    only files that were opened.
    """
    try:
        return io.FileIO(
            os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC),
            "r" if flags == os.O_RDONLY else "r+",
        )
    finally:
        os.close(fd)


def _nobody_else_has_it_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


def _sealed_mapping(fd: int, size: int) -> ctypes.Array[ctypes.c_char] | None:
    """A mapping to write by, of a memfd that is sealed against all other writes; None where the
    kernel cannot do so, or has no leases: then the memfd can be used once.
    """
    if _leases_tell() and _nobody_else_has_it_open(fd):
        array = map_memory(fd, size, mmap.MAP_SHARED, owner=os.getpid())
        try:
            fcntl.fcntl(
                fd, fcntl.F_ADD_SEALS, _seals("F_SEAL_SHRINK", "F_SEAL_GROW") | _F_SEAL_FUTURE_WRITE
            )
        except OSError:
            del array
        else:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals("F_SEAL_SEAL"))
            # a child does not unmap it, see map_memory
            libc().madvise(ctypes.addressof(array), size, mmap.MADV_DONTFORK)
            return array
    fcntl.fcntl(
        fd, fcntl.F_ADD_SEALS, _seals("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE", "F_SEAL_SEAL")
    )
    return None


def _seals(*names: str) -> int:
    # By name: the module has them on Linux alone, and this one must import everywhere.
    return sum(getattr(fcntl, name) for name in names)


def _lost(location: SegmentLocation, reason: str) -> ProtocolError:
    return ProtocolError(
        f"the shared memory {location.name} ({location.size} bytes, descriptor {location.fd} of "
        f"process {location.pid}) cannot "
        f"be attached: {reason}. Its process has ended, or let go of it too early; look at the "
        "log of that process.",
        location=location,
    )


def _verify(location: SegmentLocation, fd: int, owner_uid: int) -> None:
    """Make sure that ``fd`` is the segment that the location names, made by this user, and is
    sealed.
    """
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
        raise _lost(location, f"it is no memfd ({exc.strerror})") from exc
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
            f"it has {status.st_size} bytes, which the buffers at {location.offsets} do not fit",
        )
