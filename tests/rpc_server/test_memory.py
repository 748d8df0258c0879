"""Copies of memory by several threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from helmsman.rpc_server.memory import Span, _copy, _in_parallel


def test_an_interrupt_waits_for_what_other_threads_copy() -> None:
    """Its caller lets go of the memory then."""
    source, target = np.ones(1 << 26, np.uint8), np.zeros(1 << 26, np.uint8)
    begun, ended = threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        for _ in range(8):
            _copy([Span(target.ctypes.data, source.ctypes.data, source.nbytes)])
        ended.set()

    def interrupted() -> None:
        begun.wait()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _in_parallel([interrupted, copy])
    assert ended.is_set()
