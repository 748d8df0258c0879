"""What a worker's threads and tasks are doing, as text."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from types import FrameType
from typing import Any

_OWN_PACKAGE = "helmsman.rpc_server."


def all_stacks() -> str:
    """The Python stacks of all threads of this process, the newest frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, '?')} ({ident})\n{_format(frame)}")
    return "\n".join(parts)


def thread_stack(thread: threading.Thread | None) -> str:
    """The stack of one thread without our own frames at its root; '' when it is not running."""
    frame = sys._current_frames().get(thread.ident) if thread is not None and thread.ident is not None else None
    return _format(frame, skip_own=True) if frame is not None else ""


def task_stack(task: asyncio.Task[Any]) -> str:
    """The stack of a suspended or running task, through the coroutines that it awaits."""
    frames: list[FrameType] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is None:
            break
        if not _is_own(frame):
            frames.append(frame)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    lines: list[str] = []
    for frame in frames:
        lines += traceback.format_list(traceback.StackSummary.extract([(frame, frame.f_lineno)]))
    return "".join(lines).rstrip("\n")


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_OWN_PACKAGE)


def _format(frame: FrameType, *, skip_own: bool = False) -> str:
    entries = list(traceback.walk_stack(frame))
    entries.reverse()
    if skip_own:
        last_own = max((index for index, (each, _) in enumerate(entries) if _is_own(each)), default=-1)
        entries = entries[last_own + 1 :]
    return "".join(traceback.format_list(traceback.StackSummary.extract(iter(entries)))).rstrip("\n")
