"""Test that references of Ray are not released while another thread shuts Ray down."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

pytest.importorskip("ray")

from helmsman.controller._scheduler.ray.embedded import begin_shutdown, keeping


class Reference:
    """Stands for an ObjectRef; Ray ends a process that releases one at a wrong time."""


def released(reference: weakref.ref[Reference], *, limit_s: float = 30.0) -> bool:
    deadline = time.monotonic() + limit_s
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    return reference() is None


def test_keeping_during_a_shutdown() -> None:
    may_end = threading.Event()

    def shut_down() -> None:
        may_end.wait(60)

    shutdown = begin_shutdown(shut_down)
    try:
        held, cyclic = Reference(), Reference()
        vars(cyclic)["self"] = cyclic
        watched, in_cycle = weakref.ref(held), weakref.ref(cyclic)
        with keeping(held):
            pass
        del held, cyclic
        assert watched() is not None
        assert not gc.isenabled()
        assert in_cycle() is not None
    finally:
        may_end.set()
    shutdown.result(60)
    assert released(watched)
    assert gc.isenabled()


def test_keeping_without_a_shutdown() -> None:
    held = Reference()
    watched = weakref.ref(held)
    with keeping(held):
        pass
    del held
    assert watched() is None
