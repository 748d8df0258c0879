"""A main thread that is free for engine calls, since only it can run Python's signal handlers.

Ray's worker program keeps the main thread in its own loop. ``run_beside`` runs it elsewhere.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType

OFFER_VARIABLE = "HELMSMAN_FREE_MAIN_THREAD"
"""Variable of a forked worker whose main thread is to be free; other workers of Ray keep theirs for
tasks and actors of the script.
"""
ENGINE_CODE = "_run_engine_code"
"""Name of the function that runs all engine code of the main thread."""
_WAKE_S = 1.0
"""Longest time in seconds until an idle main thread handles a signal that another one received."""
_work: queue.SimpleQueue[Callable[[], None]] | None = None


def runs_on_main_thread(work: Callable[[], None]) -> bool:
    """Run work on the main thread, if it is free; returns False otherwise."""
    if _work is None:
        return False
    _work.put(work)
    return True


def run_beside(program: Callable[[], object]) -> None:
    """Run a program on another thread until it ends the process; this main thread becomes free.

    SIGTERM ends the process. SIGINT interrupts the program until the main thread gets work.
    """
    global _work
    _work = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, _terminated)
    # An embedded Ray blocks it because of the terminal; children of engines would inherit this.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    thread = threading.Thread(target=_run, args=(program,), name="program", daemon=True)
    thread.start()
    while True:
        try:
            work = _work.get(timeout=_WAKE_S)
        except queue.Empty:
            continue
        except KeyboardInterrupt:  # Ray cancels a task by it, here one that an engine has started
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
            )
            continue
        signal.signal(signal.SIGINT, interrupt_engine)
        work()


def interrupt_engine(_: int, frame: FrameType | None) -> None:
    """Handle SIGINT: interrupt engine code; ignore it between calls, where a call would be lost."""
    while frame is not None:
        if frame.f_code.co_name == ENGINE_CODE:
            raise KeyboardInterrupt
        frame = frame.f_back


def _run(program: Callable[[], object]) -> None:
    code = 1
    try:
        program()
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    # The program's outermost frame: its error must reach the log.
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        # The main thread may be in engine code, so the interpreter cannot end as usual.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _terminated(*_: object) -> None:
    print("helmsman: this process received SIGTERM and ends", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGTERM)
