"""The wait of a task: the frames through which it waits, across tasks, event loops and threads.

asyncio has no public way from a task to the future that it awaits, or from a future to the work
that completes it, before Python 3.14; the attributes that are read here exist from 3.11 on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import linecache
import re
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, NamedTuple

from helmsman.api.run_state import Frame, StackTrace
from helmsman.rpc_server._host.threads import coroutine_frames, frames_of

_OWN = f"{Path(__file__).parents[2]}/"
_STANDARD = sysconfig.get_paths()["stdlib"]
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages)/|^<")
_MODEL = re.compile(r"/controller/_rollout/(?!episode_runner|executor|reward_|staleness)")
_PROCESS = re.compile(r"/(?:asyncio/(?:base_)?subprocess|subprocess)\.py$")
_POOL = re.compile(r"/concurrent/futures/thread\.py$|/anyio/_backends/")
"""Files whose functions ``run`` compute the result of a future."""
_PRIVATE = re.compile(r"(?:^|\.)_")
_MOST_FRAMES, _MOST_STEPS = 60, 32
_Future = asyncio.Future, concurrent.futures.Future


class TaskWait(NamedTuple):
    """The wait of a task."""

    frames: list[FrameType]
    """Outermost first; those of the thread that works for it, if there is one, come last."""
    leaf: Any
    """The future that nothing here completes; None if the task or its thread runs."""
    thread: threading.Thread | None = None
    """The thread that runs the last frames."""
    tasks: frozenset[asyncio.Task[Any]] = frozenset()
    """The task, and those that it awaits."""
    blocks_loop: bool = False
    """Whether it runs in the thread of its event loop, which runs no other task meanwhile."""

    @property
    def site(self) -> int:
        """Index of the innermost frame of the user's code, else of ours, else of all."""
        indices = range(len(self.frames) - 1, -1, -1)
        theirs = (each for each in indices if not _is_library(self.frames[each]))
        own = (each for each in indices if _file(self.frames[each]).startswith(_OWN))
        return next(theirs, next(own, len(indices) - 1))

    @property
    def is_explained(self) -> bool:
        """Whether a generation request, or another task of its loop, explains the wait."""
        return self.is_ready or any(_MODEL.search(_file(each)) for each in self.frames)

    @property
    def is_ready(self) -> bool:
        """Whether it awaits nothing, but does not run."""
        is_polling = self.frames and self.frames[-1].f_code.co_name == "__sleep0"
        return self.leaf is None and self.thread is None and not is_polling

    @property
    def sleeps(self) -> bool:
        """Whether its innermost line sleeps."""
        return bool(self.frames) and "sleep(" in _line(self.frames[-1])

    @property
    def is_process(self) -> bool:
        """Whether it waits for a child process."""
        return any(_PROCESS.search(_file(each)) for each in self.frames)

    @property
    def key(self) -> tuple[object, ...]:
        """Changes when the task makes progress; a loop that sleeps makes none."""
        names = tuple(
            (each.f_code, None if self.thread is not None else each.f_lineno)
            for each in self.frames
        )
        is_sleep = self.frames and self.frames[-1].f_code.co_qualname == "sleep"
        # Not its id, which the next future may have.
        return (*names, None if is_sleep or self.leaf is None else weakref.ref(self.leaf))

    def text(self, *, source: bool = False) -> str:
        """Describe it: 'awaits Event.wait at train.py:20', with the line's source if asked."""
        site = self.site
        inner = self.frames[site + 1 :]
        if self.is_ready:
            return "is ready, but its event loop does not run it"
        if self.blocks_loop and self.thread is not None:
            doing = f"blocks the event loop of thread {self.thread.name}"
        elif self.thread is not None:
            doing = f"runs in thread {self.thread.name}"
        elif inner and inner[0].f_code.co_qualname == "sleep":
            doing = f"sleeps for {inner[0].f_locals.get('delay', 0.0):g} s"
        elif inner:
            names = [each.f_code.co_qualname for each in inner]
            public = (each for each in names if not _PRIVATE.search(each))
            doing = f"awaits {next(public, names[0])}"
        else:
            doing = f"awaits a {type(self.leaf).__name__}"
        frame = self.frames[site]
        place = f"{_file(frame).rpartition('/')[2]}:{frame.f_lineno}"
        if not source:
            return f"{doing} at {place}"
        failed = next(self._failed_tasks(), "")
        return f"{doing} at {place} ({_line(frame)[:80] or frame.f_code.co_name}){failed}"

    def _failed_tasks(self) -> Iterator[str]:
        """Yield the errors of tasks that the user's functions have started and do not await."""
        for frame in self.frames:
            tasks = _tasks_in(frame.f_locals.values()) if not _is_library(frame) else ()
            for each in tasks:
                # Not exception(), after which asyncio does not log it.
                if each.done() and (error := getattr(each, "_exception", None)) is not None:
                    yield f", and its task {each.get_coro().__qualname__} has raised {error!r:.80}"

    def stack(self) -> StackTrace:
        """Return its frames."""
        found = [
            Frame(_file(each), each.f_lineno, each.f_code.co_name, _line(each)[:200])
            for each in self.frames[-_MOST_FRAMES:]
        ]
        return StackTrace(thread=self.thread.name if self.thread else "task", frames=found)


def waiting_of(task: asyncio.Task[Any], threads: Threads) -> TaskWait:
    """Return the wait of a task; works from any thread, while the task's loop runs."""
    frames: list[FrameType] = []
    seen, tasks = set[int](), set[asyncio.Task[Any]]()
    step: Any = task
    leaf: Any = None
    for _ in range(_MOST_STEPS):
        seen.add(id(step))
        if isinstance(step, asyncio.Task):
            tasks.add(step)
            own = list(coroutine_frames(step))
            frames += own
            leaf = step = getattr(step, "_fut_waiter", None)
            if step is None:
                thread, inside = threads.in_frame(own[-1]) if own else (None, [])
                is_here = thread is not None
                return TaskWait(frames + inside, None, thread, frozenset(tasks), is_here)
            if isinstance(step, asyncio.Task):
                continue
            seen.add(id(step))
        inner = list(_continuations(step))
        if frames and _is_library(frames[-1]):
            inner += _tasks_in(frames[-1].f_locals.values())
        following = next((e for e in inner if id(e) not in seen and not e.done()), None)
        if following is None:
            thread, inside = threads.completing(step)
            leaf = None if thread is not None else leaf
            return TaskWait(frames + inside, leaf, thread, frozenset(tasks))
        leaf = step = following
    return TaskWait(frames, leaf, None, frozenset(tasks))


def _continuations(future: Any) -> Iterator[Any]:
    """Yield the futures whose results a future awaits: of gather, shield, and other loops."""
    yield from getattr(future, "_children", ())
    callbacks = getattr(future, "_callbacks", None) or getattr(future, "_done_callbacks", None)
    for each in list(callbacks or ()):
        function = each[0] if isinstance(each, tuple) else each
        for cell in (function.__closure__ or ()) if isinstance(function, FunctionType) else ():
            try:
                content = cell.cell_contents
            except ValueError:  # empty
                continue
            if isinstance(content, _Future):
                yield content


def _tasks_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the tasks among the variables of asyncio.wait, wait_for or a TaskGroup."""
    for each in values:
        if isinstance(each, asyncio.Task):
            yield each
        found = each if isinstance(each, set | list | tuple) else getattr(each, "_tasks", ())
        if isinstance(found, set | list | tuple):
            yield from (e for e in list(found) if isinstance(e, asyncio.Task))


class Threads:
    """The frames of all threads at one time, by frame and by the future of their work."""

    def __init__(self) -> None:
        self._by_frame = dict[FrameType, tuple[threading.Thread, list[FrameType]]]()
        self._by_future = dict[int, tuple[threading.Thread, list[FrameType]]]()
        threads = {each.ident: each for each in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            frames = frames_of(frame)
            for index, each in enumerate(frames) if ident in threads else ():
                found = threads[ident], frames[index + 1 :]
                self._by_frame[each] = found
                if each.f_code.co_name == "run" and _POOL.search(_file(each)):
                    for value in list(each.f_locals.values()):
                        future = getattr(value, "future", value)
                        if isinstance(future, _Future):
                            self._by_future[id(future)] = found

    def in_frame(self, frame: FrameType) -> tuple[threading.Thread | None, list[FrameType]]:
        """Return the thread that runs a frame, and its frames below that one."""
        return self._by_frame.get(frame, (None, []))

    def completing(self, future: object) -> tuple[threading.Thread | None, list[FrameType]]:
        """Return the thread that computes the result of a future, and its frames."""
        return self._by_future.get(id(future), (None, []))


def _is_library(frame: FrameType) -> bool:
    file = _file(frame)
    return file.startswith((_OWN, _STANDARD)) or _LIBRARY.search(file) is not None


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _line(frame: FrameType) -> str:
    return linecache.getline(_file(frame), frame.f_lineno, frame.f_globals).strip()
