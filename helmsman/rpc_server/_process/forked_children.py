"""Signals in processes that engine code forks: the defaults, as in children of a plain script."""

from __future__ import annotations

import os
import signal
import threading

_SIGTERM = frozenset({signal.SIGTERM})


class _Masks(threading.local):
    """Signal masks of a thread before its forks; a signal handler may fork within a fork."""

    def __init__(self) -> None:
        self.saved: list[set[int]] = []


def give_children_default_signals() -> None:
    """Let children that this process forks from now on begin with default signal handlers.

    Its present handler of SIGTERM would keep a child alive after ``terminate()``. Python discards a
    signal that a child receives before its first bytecode, so SIGTERM is blocked until the handler
    is reset. Handlers that engine code installs are inherited, as in a script.
    """
    own, masks = signal.getsignal(signal.SIGTERM), _Masks()

    def block() -> None:
        masks.saved.append(signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM))

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.saved.pop())

    def reset() -> None:
        if signal.getsignal(signal.SIGTERM) is own:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        restore()

    os.register_at_fork(before=block, after_in_parent=restore, after_in_child=reset)
