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

OFFER_VARIABLE = "HELMSMAN_FREE_MAIN_THREAD"
"""Variable of a forked worker whose main thread is to be free; other workers of Ray keep theirs for
tasks and actors of the script.
"""
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

    SIGTERM ends the process. SIGINT interrupts the work of the main thread, or else the program.
    """
    global _work
    _work = given = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, _terminated)
    thread = threading.Thread(target=_run, args=(program,), name="program", daemon=True)
    thread.start()
    work: Callable[[], None] | None = None
    while True:
        try:
            work = work or given.get(timeout=_WAKE_S)
            work()
        except queue.Empty:
            continue
        except KeyboardInterrupt:  # work between two calls continues
            if work is None:  # Ray cancels a task by it, here one that an engine has started
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
                )


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
