"""Memory behind buffers, without copies and without the marks on it. Standard library only."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


@functools.lru_cache(maxsize=1024)
def bytes_type(num_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """The ctypes type of so many bytes."""
    # Making a ctypes array type costs several microseconds; shapes repeat.
    return ctypes.c_char * num_bytes


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of CPython's C interface."""

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
    """Where the bytes of a contiguous buffer begin, also of one that is marked as read-only. Valid while the view lives."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address: int = buffer.buf or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


def without_write_check(data: Any) -> Any:
    """``data`` itself if it can be written to, else the same memory without the mark, which torch would warn about."""
    view = memoryview(data)
    if not view.readonly:
        return data
    array = bytes_type(view.nbytes).from_address(address_of(view))
    array.owner = view  # type: ignore[attr-defined]
    return array
