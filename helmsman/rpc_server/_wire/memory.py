"""Memory behind buffers: without copies and without the marks on it, and copied fast. Standard
library only.
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
    # Making a ctypes array type costs several microseconds; shapes repeat.
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
    """Where the bytes of a contiguous buffer begin, also of one that is marked as read-only. Valid
    while the view lives.
    """
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address: int = buffer.buf or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


def without_write_check(data: Any) -> Any:
    """``data`` itself if it can be written to, else the same memory without the mark, which torch
    would warn about.
    """
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
"""More than a few threads wait for the memory and not for each other."""


class Span(NamedTuple):
    target: int
    """An address, as is ``source``."""
    source: int
    num_bytes: int


def copy(spans: Sequence[Span]) -> None:
    """Copy bytes, on several threads where there are many."""
    num_threads = _num_threads(sum(span.num_bytes for span in spans))
    if num_threads == 1:
        _copy(spans)
        return
    chunks = [
        Span(span.target + start, span.source + start, min(_CHUNK_BYTES, span.num_bytes - start))
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
    """Map the pages of large buffers, on several threads where there are many: a third of what a
    reader's faults would cost.

    A kernel that is older than 5.14 refuses, which does not matter.
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


def _copy(spans: Sequence[Span]) -> None:
    for span in spans:
        ctypes.memmove(*span)  # without the interpreter's lock


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
            # What was begun is needed if the next cannot be
            begun.append(_pool(os.getpid()).submit(other))  # noqa: PERF401
        mine()
    except RuntimeError:
        # at the interpreter's end no thread can be had any more; to do a part twice does no harm
        for part in parts:
            part()
    finally:
        wait(begun)  # also after an interrupt: the memory must not go while others work on it


@functools.cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """Of this process: a forked child has none of its parent's threads."""
    return ThreadPoolExecutor(_MOST_THREADS - 1, "helmsman-copy")


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library, whose calls let go of the interpreter's lock."""
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
    """Memory that is unmapped when nothing refers to it any more, by the process ``owner`` alone
    where given. Raises OSError.

    Not by the mmap module, which keeps a descriptor for each mapping: a few thousand received
        batches would exhaust them.
    """
    address = libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes of memory: {os.strerror(number)}")
    array = (ctypes.c_char * size).from_address(address)
    # Not at exit: tensors that live until then may still be read by other threads.
    weakref.finalize(array, _unmap, address, size, owner).atexit = False
    return array


def _unmap(address: int, size: int, owner: int | None) -> None:
    if owner is None or owner == os.getpid():
        # in a forked child these addresses may be something else's by now
        libc().munmap(address, size)


def own_copy(data: Any) -> Any:
    """A copy that can be written to. Large ones lie in huge pages where the system has them: fresh
    pages of the usual size take several times as long as the copying. Raises OSError.
    """
    view = memoryview(data)
    if view.nbytes < _PARALLEL_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return bytearray(view)
    array = map_memory(-1, view.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(array)
    libc().madvise(address, view.nbytes, mmap.MADV_HUGEPAGE)
    copy([Span(address, address_of(view), view.nbytes)])
    return pickle.PickleBuffer(array).raw()
