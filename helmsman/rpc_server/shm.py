"""Large buffers between processes of one machine: packed once into memory that the receiver maps.

A segment is a sealed memfd. It has no name in any file system, so nothing is left behind however its owner dies, and the
kernel frees it with the last descriptor and mapping. The receiver opens it through ``/proc`` and maps it privately: what
arrives is not copied, can be written to (pages are copied on write), and stays valid when the sender is gone. The seals
promise that nobody changes or cuts a segment off below a receiver.

    sender                                            receiver
    wire, segment = to_wire(encode(value))
    send msgpack(wire) ─────────────────────────────> payload = from_wire(wire)
    segment.close()  <──────────── any answer ─────── value = decode(payload)

The sender must keep the segment open until the receiver has attached; sooner, and the receiver gets a ProtocolError. After
``to_wire`` nothing refers to the sender's own memory any more: tensors may be written to again.

Limits: descriptors are close-on-exec, but a child made by a bare ``fork`` keeps its copies (and their memory) until it ends.
What is left of one segment keeps the mapping of the whole segment. Both processes must see each other in ``/proc``, so they
share a PID namespace and a user. Without memfd (macOS) everything goes inside the message, at the price of copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import pickle
import secrets
import stat
import sys
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgspec

from helmsman.api.errors import ProtocolError
from helmsman.rpc_server.codec import Payload

HAS_SEGMENTS = sys.platform == "linux" and hasattr(os, "memfd_create")
"""Whether this machine has segments; without them ``to_wire`` puts all inside the message."""

INLINE_BYTES = 64 * 1024
"""From here on a buffer, or a pickle stream, goes in a segment."""

_ALIGNMENT = 64
_NAME = "helmsman-"
_MAX_VECTORS = 1024  # IOV_MAX of Linux
_INLINE_BUDGET = 16  # thresholds' worth of small buffers inside one message
_SEALS = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE")


class SegmentLocation(msgspec.Struct, frozen=True):
    """Where another process of this machine and user finds a segment."""

    pid: int
    """Its owner."""
    fd: int
    """The owner's descriptor."""
    name: str
    """Name of the memfd, which no other has: a recycled pid or descriptor is noticed."""
    size: int
    """In bytes."""
    offsets: list[int]
    """Start of each buffer, in bytes."""
    sizes: list[int]
    """Length of each buffer, in bytes."""


class ShmSegment:
    """Buffers packed into shared memory, as their owner holds them. A context manager; ``close`` gives the memory back once
    no receiver maps it any more."""

    location: SegmentLocation

    def __init__(self, location: SegmentLocation) -> None:
        self.location = location
        # A file object and not the bare number: it is closed once at most, and a forgotten one shows as a ResourceWarning.
        self._file = open(location.fd, "rb", buffering=0)  # noqa: SIM115 - closed by close()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.location.size

    def close(self) -> None:
        """Let go of the segment; idempotent. Receivers that have attached keep theirs."""
        self._file.close()

    def __enter__(self) -> ShmSegment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def pack(buffers: Sequence[Any]) -> ShmSegment:
    """Copy buffers into a new segment.

    Args:
        buffers: one-dimensional contiguous buffers of bytes; none of them may be empty.

    Raises:
        OSError: no memory, or no file descriptor, is left.
    """
    views = [memoryview(buffer) for buffer in buffers]
    sizes = [view.nbytes for view in views]
    offsets, size = [], 0
    for each in sizes:
        offsets.append(size)
        size += -(-each // _ALIGNMENT) * _ALIGNMENT
    name = _NAME + secrets.token_hex(8)
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        # Written and not mapped: a page is allocated and filled at once, without a fault and without being zeroed before.
        padding = bytes(_ALIGNMENT)
        vectors: list[memoryview] = []
        for view in views:
            vectors.append(view)
            if view.nbytes % _ALIGNMENT:
                vectors.append(memoryview(padding)[: -view.nbytes % _ALIGNMENT])
        _write_all(fd, vectors)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
        undo.pop_all()
    return ShmSegment(SegmentLocation(pid=os.getpid(), fd=fd, name=name, size=size, offsets=offsets, sizes=sizes))


def attach(location: SegmentLocation) -> list[memoryview]:
    """Map a segment of another process privately.

    Returns:
        Its buffers, aligned to 64 bytes. They can be written to, which nobody else sees, and keep the mapping alive. The first
        write to a page of 4 KiB copies it.

    Raises:
        ProtocolError: the segment is gone (its owner closed it, or died), or is not what the location says.
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
        array = _map_privately(fd, location.size)
    finally:
        os.close(fd)
    whole = pickle.PickleBuffer(array).raw()
    return [whole[offset : offset + size] for offset, size in zip(location.offsets, location.sizes, strict=True)]


class WirePayload(msgspec.Struct, array_like=True):
    """A payload as one message of msgpack: small parts inside, large ones in a segment."""

    data: bytes
    """The pickle stream; empty when it is the last buffer of the segment."""
    inline: list[bytearray]
    """The small buffers, in their order."""
    is_inline: list[bool]
    """For each buffer of the payload, in order, whether it is in ``inline``; the others are in the segment, in order."""
    handles: bytes
    """The handles, pickled, since their locations are the transport's own; empty when there are none."""
    segment: SegmentLocation | None
    """Where the large buffers are."""


def to_wire(payload: Payload, *, threshold: int = INLINE_BYTES) -> tuple[WirePayload, ShmSegment | None]:
    """Make a payload ready to send to another process of this machine.

    Args:
        payload: from ``encode``.
        threshold: buffers, and a pickle stream, of this many bytes or more go in a segment. So do smaller ones once those
            inside the message make up 16 times as much.

    Returns:
        What msgpack can encode, and the segment, if one was needed, which is to be kept open until the receiver has attached.

    Raises:
        OSError: no memory, or no file descriptor, is left for a segment.
    """
    inline: list[bytearray] = []
    is_inline: list[bool] = []
    shared: list[Any] = []
    budget = _INLINE_BUDGET * threshold
    for buffer in payload.buffers:
        num_bytes = memoryview(buffer).nbytes
        inside = not HAS_SEGMENTS or num_bytes == 0 or (num_bytes < threshold and num_bytes <= budget)
        is_inline.append(inside)
        if inside:
            inline.append(bytearray(buffer))
            budget -= num_bytes
        else:
            shared.append(buffer)
    data = payload.data if isinstance(payload.data, bytes) else bytes(payload.data)
    if HAS_SEGMENTS and len(data) >= threshold:
        shared.append(data)
        data = b""
    segment = pack(shared) if shared else None
    handles = pickle.dumps(payload.handles, 5) if payload.handles else b""
    return WirePayload(data, inline, is_inline, handles, segment.location if segment else None), segment


def from_wire(wire: WirePayload) -> Payload:
    """The payload that ``to_wire`` made ready. All its buffers can be written to and belong to the receiver alone.

    Raises:
        ProtocolError: the segment is gone, or is not what the message says.
    """
    shared = attach(wire.segment) if wire.segment else []
    if len(wire.inline) + len(shared) != len(wire.is_inline) + (not wire.data):
        raise ProtocolError(
            f"a payload of {len(wire.is_inline)} buffers came with {len(wire.inline)} inside the message and {len(shared)} "
            "in its segment. Controller and worker must run the same version of helmsman."
        )
    data = wire.data or shared.pop()
    inside, outside = iter(wire.inline), iter(shared)
    buffers = [next(inside) if is_inside else next(outside) for is_inside in wire.is_inline]
    return Payload(data, buffers, pickle.loads(wire.handles) if wire.handles else [])


def _seals() -> int:
    # By name: the module has them on Linux alone, and this one must import everywhere.
    return sum(getattr(fcntl, name) for name in _SEALS)


def _write_all(fd: int, vectors: list[memoryview]) -> None:
    first = 0
    while first < len(vectors):
        written = os.writev(fd, vectors[first : first + _MAX_VECTORS])
        while first < len(vectors) and written >= vectors[first].nbytes:
            written -= vectors[first].nbytes
            first += 1
        if written:  # Linux writes at most 2 GiB at once
            vectors[first] = vectors[first][written:]


def _lost(location: SegmentLocation, reason: str) -> ProtocolError:
    return ProtocolError(
        f"the shared memory {location.name} ({location.size} bytes, descriptor {location.fd} of process {location.pid}) cannot "
        f"be attached: {reason}. Its process has ended, or let go of it too early; look at the log of that process.",
        location=location,
    )


def _verify(location: SegmentLocation, fd: int, owner_uid: int) -> None:
    """Make sure that ``fd`` is the segment that the location names, made by this user, and cannot change any more."""
    target, status = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd)
    if target != f"/memfd:{location.name} (deleted)" or not location.name.startswith(_NAME) or not stat.S_ISREG(status.st_mode):
        raise _lost(location, f"the descriptor now is {target}")
    if {owner_uid, status.st_uid} != {os.geteuid()}:
        raise _lost(
            location, f"it belongs to user {status.st_uid}, its process to user {owner_uid}, this one to {os.geteuid()}"
        )
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as exc:
        raise _lost(location, f"it is no memfd ({exc.strerror})") from exc
    if seals != _seals():
        raise _lost(location, "it is not sealed, so it could change while it is read")
    ends = [offset + size for offset, size in zip(location.offsets, location.sizes, strict=True)]
    if (
        status.st_size != location.size
        or not location.offsets
        or min(location.offsets + location.sizes) < 0
        or max(ends) > location.size
    ):
        raise _lost(location, f"it has {status.st_size} bytes, which the buffers at {location.offsets} do not fit")


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def _map_privately(fd: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """Memory that is unmapped when nothing refers to it any more.

    The mmap module keeps a duplicate of the descriptor for each mapping (Python 3.13 can do without), and a receiver that
    collects a few thousand batches would run out of descriptors; so libc is called directly.
    """
    libc = _libc()
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes of shared memory: {os.strerror(number)}")
    array = (ctypes.c_char * size).from_address(address)
    # Not at exit: tensors that live until then may still be read by other threads.
    weakref.finalize(array, libc.munmap, address, size).atexit = False
    return array
