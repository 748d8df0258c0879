"""Memory behind buffers: addresses, read-only marks, parallel copies and mappings.

Standard library only.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple


@functools.lru_cache(maxsize=1024)
def bytes_type(num_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    # Creating a ctypes array type takes several microseconds, and shapes repeat.
    return ctypes.c_char * num_bytes


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(view: memoryview) -> int:
    """Return the address of a contiguous buffer, read-only or not; valid while the view lives."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address: int = buffer.buf or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


def without_write_check(data: Any) -> Any:
    """Return the same memory without the read-only mark, about which torch would warn."""
    view = memoryview(data)
    if not view.readonly:
        return data
    array = bytes_type(view.nbytes).from_address(address_of(view))
    array.owner = view  # type: ignore[attr-defined]
    return array


_MADV_POPULATE_READ = 22  # Linux 5.14; not in the mmap module
_POPULATED_FROM = 1 << 18
_PARALLEL_FROM = 4 << 20
_CHUNK_BYTES = 1 << 20
_MOST_THREADS = 4
"""More threads are limited by memory bandwidth."""


class CopySpan(NamedTuple):
    target: int
    """Address of the destination; ``source`` is an address, too."""
    source: int
    num_bytes: int


def copy(spans: Sequence[CopySpan]) -> None:
    """Copy bytes, on several threads if there are many."""
    num_threads = _num_threads(sum(span.num_bytes for span in spans))
    if num_threads == 1:
        _copy(spans)
        return
    chunks = [
        CopySpan(
            span.target + start, span.source + start, min(_CHUNK_BYTES, span.num_bytes - start)
        )
        for span in spans
        for start in range(0, span.num_bytes, _CHUNK_BYTES)
    ]
    step = -(-len(chunks) // num_threads)
    _in_parallel(
        [
            functools.partial(_copy, chunks[start : start + step])
            for start in range(0, len(chunks), step)
        ]
    )


def populate(views: Sequence[memoryview]) -> None:
    """Map the pages of large buffers, on several threads for a large one.

    This costs a third of the page faults of a reader. Kernels before 5.14 reject the call, which
    is harmless.
    """
    for view in views:
        if view.nbytes >= _POPULATED_FROM:
            start = address_of(view) // mmap.PAGESIZE * mmap.PAGESIZE
            end = address_of(view) + view.nbytes
            step = -(-(end - start) // _num_threads(view.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
            parts = [
                (each, min(step, end - each), _MADV_POPULATE_READ)
                for each in range(start, end, step)
            ]
            _in_parallel([functools.partial(libc().madvise, *part) for part in parts])


def _copy(spans: Sequence[CopySpan]) -> None:
    for span in spans:
        ctypes.memmove(*span)  # releases the interpreter lock


def _num_threads(num_bytes: int) -> int:
    if num_bytes < _PARALLEL_FROM:
        return 1
    return min(
        _MOST_THREADS,
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def _in_parallel(parts: Sequence[Callable[[], object]]) -> None:
    mine, *others = parts
    begun = []
    try:
        for other in others:
            # If submitting the next part fails, the finally block waits for those submitted.
            begun.append(_pool(os.getpid()).submit(other))  # noqa: PERF401
        mine()
    except RuntimeError:
        # During interpreter shutdown no thread can start. Doing a part twice does no harm.
        for part in parts:
            part()
    finally:
        wait(begun)  # even after an interrupt: the memory must outlive the threads that use it


@functools.cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """Return the pool of this process: a forked child has none of its parent's threads."""
    return ThreadPoolExecutor(_MOST_THREADS - 1, "helmsman-copy")


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library, whose calls release the interpreter lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def map_memory(
    fd: int, size: int, flags: int, *, owner: int | None = None
) -> ctypes.Array[ctypes.c_char]:
    """Map memory that is unmapped when its last reference is dropped.

    The mmap module would keep a descriptor per mapping, and a few thousand received batches would
    exhaust them.

    Args:
        fd: Descriptor of the file; -1 for anonymous memory.
        size: Number of bytes.
        flags: Flags of mmap(2).
        owner: Pid of the only process that unmaps it; None for any.

    Raises:
        OSError: The memory cannot be mapped.
    """
    address = libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes of memory: {os.strerror(number)}")
    array = (ctypes.c_char * size).from_address(address)
    # Not at exit: other threads may still read tensors that live until then.
    weakref.finalize(array, _unmap, address, size, owner).atexit = False
    return array


def _unmap(address: int, size: int, owner: int | None) -> None:
    if owner is None or owner == os.getpid():
        # In a forked child these addresses may hold something else.
        libc().munmap(address, size)


def own_copy(data: Any) -> Any:
    """Return a writable copy.

    Large ones use huge pages where available: faulting in normal pages takes several times as long
    as copying. Raises OSError if memory cannot be mapped.
    """
    view = memoryview(data)
    if view.nbytes < _PARALLEL_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return bytearray(view)
    array = map_memory(-1, view.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(array)
    libc().madvise(address, view.nbytes, mmap.MADV_HUGEPAGE)
    copy([CopySpan(address, address_of(view), view.nbytes)])
    return pickle.PickleBuffer(array).raw()
