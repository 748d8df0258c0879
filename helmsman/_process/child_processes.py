"""Processes that engine code starts with ``os.fork`` or multiprocessing, as in a plain script."""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing.reduction import ForkingPickler
from pickle import Pickler
from types import FunctionType
from typing import Any

import cloudpickle

from helmsman._process.main_thread import interrupt_engine

_SIGTERM = frozenset({signal.SIGTERM})


class _Masks(threading.local):
    """Signal masks of a thread before its forks; a signal handler may fork within a fork."""

    def __init__(self) -> None:
        self.saved: list[set[int]] = []


def prepare_for_children() -> None:
    """Let processes that engine code starts from now on behave as those of a script.

    Forked ones end at SIGTERM and SIGINT: the handlers that this process has now are not inherited,
    while those that engine code installs are. Spawned ones do not run this process's program. All
    can use functions and classes that the user's script defines.
    """
    own, masks = signal.getsignal(signal.SIGTERM), _Masks()

    def block() -> None:
        masks.saved.append(signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM))

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.saved.pop())

    def reset() -> None:
        if signal.getsignal(signal.SIGTERM) is own:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is interrupt_engine:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        restore()

    # Python discards a signal that a child receives before its first bytecode, so it is blocked.
    os.register_at_fork(before=block, after_in_parent=restore, after_in_child=reset)
    # multiprocessing would run the file in a spawned child, and that of a Ray worker imports Ray.
    vars(sys.modules["__main__"]).pop("__file__", None)
    _pickle_main_by_value()


def _pickle_main_by_value() -> None:
    """Let multiprocessing send what a script defines, which no worker can import."""
    ForkingPickler.reducer_override = _reduced  # type: ignore[method-assign]


def _reduced(_: Pickler, value: object) -> Any:
    if isinstance(value, FunctionType | type) and value.__module__ == "__main__":
        return _load, (cloudpickle.dumps(value),)
    return NotImplemented


def _load(data: bytes) -> Any:
    _pickle_main_by_value()  # a spawned child may return instances
    return cloudpickle.loads(data)
