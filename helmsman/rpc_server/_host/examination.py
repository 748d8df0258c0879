"""Reports of this process about itself: stacks of its calls, memory, children and node."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import linecache
import os
import re
import resource
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from types import FrameType

from helmsman.api.run_state import ChildProcess, Frame, NodeReport, ProcessReport, StackTrace
from helmsman.rpc_server._host.collectives import last_collectives, waiting_nccl_ranks
from helmsman.rpc_server._host.threads import EngineLoop, EngineThread, awaited_frames
from helmsman.rpc_server._process.guardian import stat_fields

_MOST_FRAMES = 60
_MOST_TASKS = 50
_CLOCK_AHEAD_S = time.time() - time.monotonic()
"""Changes only when the node's clock is set."""


def examine(
    node: str, log_dir: str, engine_thread: EngineThread, loop: EngineLoop
) -> ProcessReport:
    """Report on a worker's process.

    Args:
        node: Address of the node.
        log_dir: Folder of the worker's log, whose disk is reported.
        engine_thread: The thread of synchronous calls.
        loop: The loop of asynchronous calls.
    """
    now = time.monotonic()
    stacks: list[StackTrace] = []
    occupant, thread = engine_thread.occupant, engine_thread.thread
    frames = sys._current_frames()
    if thread is not None and thread.ident in frames:
        call, since = (occupant.name, occupant.since) if occupant else ("", None)
        stacks.append(
            StackTrace(
                thread="engine",
                frames=_below_helmsman(frames[thread.ident]),
                call=call,
                running_s=None if since is None else now - since,
            )
        )
    running_calls = list(loop.running.values())
    running_calls.sort(key=lambda each: each.since)
    stacks += [
        StackTrace(
            thread="task",
            frames=_as_frames((each, each.f_lineno) for each in awaited_frames(running.task)),
            call=running.name,
            running_s=now - running.since,
        )
        for running in running_calls[:_MOST_TASKS]
        if running.task is not None
    ]
    if loop.occupant is not None and loop.thread is not None and loop.thread.ident in frames:
        # A coroutine blocks the loop.
        blocked = frames[loop.thread.ident]
        stacks.append(
            StackTrace(thread="loop", frames=_below_helmsman(blocked), call=loop.occupant.name)
        )
    return _report(node, log_dir, stacks)


def examine_script(node: str, log_dir: str) -> ProcessReport:
    """Report on the script's process: the main thread, the tasks of its loop and other threads.

    Args:
        node: Address of the node.
        log_dir: Folder of the run's logs, whose disk is reported.
    """
    main = threading.main_thread()
    stacks: list[StackTrace] = []
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, "?")
        if ident == main.ident:
            stacks.insert(0, StackTrace(thread="main", frames=_whole(frame)))
            for task in _tasks_of(frame):
                coroutine = getattr(task.get_coro(), "__qualname__", "task")
                found = _as_frames((each, each.f_lineno) for each in awaited_frames(task))
                stacks.append(StackTrace(thread=f"task {coroutine}", frames=found))
        elif not name.startswith("helmsman"):
            stacks.append(StackTrace(thread=name, frames=_whole(frame)))
    return _report(node, log_dir, stacks[:_MOST_TASKS])


def thread_stack_of(name: str) -> StackTrace | None:
    """Return the stack of a thread of this process by name; None if there is none."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name == name and thread.ident in frames:
            return StackTrace(thread=name, frames=_whole(frames[thread.ident]))
    return None


def _tasks_of(frame: FrameType | None) -> list[asyncio.Task[object]]:
    """Return the tasks of the event loop that a thread runs."""
    while frame is not None:
        loop = frame.f_locals.get("self") if frame.f_code.co_name == "run_forever" else None
        if isinstance(loop, asyncio.AbstractEventLoop):
            return list(asyncio.all_tasks(loop))
        frame = frame.f_back
    return []


def _whole(frame: FrameType) -> list[Frame]:
    entries = list(traceback.walk_stack(frame))
    return _as_frames(reversed(entries))


def _below_helmsman(frame: FrameType) -> list[Frame]:
    """Return the frames above the last one of Helmsman that calls the engine."""
    entries = list(traceback.walk_stack(frame))[::-1]
    own = [
        index
        for index, (each, _) in enumerate(entries)
        if str(each.f_globals.get("__name__", "")).startswith("helmsman.rpc_server.")
    ]
    return _as_frames(entries[own[-1] + 1 if own else 0 :])


def _as_frames(entries: Iterable[tuple[FrameType, int]]) -> list[Frame]:
    found = []
    for frame, line in list(entries)[-_MOST_FRAMES:]:
        code = frame.f_code
        text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
        found.append(Frame(code.co_filename, line, code.co_name, text[:200]))
    return found


def _report(node: str, log_dir: str, stacks: Sequence[StackTrace]) -> ProcessReport:
    used = [resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    sizes = _status_bytes()
    return ProcessReport(
        pid=os.getpid(),
        cpu_s=sum(each.ru_utime + each.ru_stime for each in used),
        rss_bytes=sizes.get("VmRSS", 0),
        swap_bytes=sizes.get("VmSwap", 0),
        runnable_s=_runnable_s(),
        clock_jump_s=time.time() - time.monotonic() - _CLOCK_AHEAD_S,
        stacks=list(stacks),
        children=_children(int(time.monotonic())),
        node=observe_node(node, log_dir),
        collectives=(collectives := last_collectives()),
        nccl_ranks=waiting_nccl_ranks(collectives),
    )


def observe_node(node: str, log_dir: str) -> NodeReport:
    """Report on this node.

    Args:
        node: Address of the node.
        log_dir: Folder of the run's logs; '' for none.
    """
    disks = {}
    for path in ("/dev/shm", tempfile.gettempdir(), log_dir):
        try:
            usage = shutil.disk_usage(path)
        except OSError:
            continue
        disks[path] = (usage.free, usage.total)
    try:
        with open("/proc/meminfo") as file:
            available = re.search(r"^MemAvailable: +(\d+) kB", file.read(), re.MULTILINE)
    except OSError:
        available = None
    return NodeReport(
        node=node,
        clock=time.time(),
        memory_available=int(available.group(1)) << 10 if available else 0,
        disks=disks,
    )


def _status_bytes() -> dict[str, int]:
    try:
        with open("/proc/self/status") as file:
            found = re.findall(r"^(Vm\w+):\s+(\d+) kB", file.read(), re.MULTILINE)
    except OSError:
        return {}
    return {name: int(size) << 10 for name, size in found}


def _runnable_s() -> float:
    """Return the time that the threads spent in the run queue, from /proc/<pid>/schedstat."""
    total = 0
    with contextlib.suppress(OSError):  # the kernel has no statistics
        for thread in os.listdir("/proc/self/task"):
            with (
                contextlib.suppress(FileNotFoundError),  # the thread has ended
                open(f"/proc/self/task/{thread}/schedstat") as file,
            ):
                total += int(file.read().split()[1])
    return total / 1e9


@functools.lru_cache(maxsize=1)
def _children(second: int) -> list[ChildProcess]:
    """Return the direct children, once a second: inline workers share one process."""
    pids: list[int] = []
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                pids += map(int, file.read().split())
    except OSError:  # a thread has ended, or the kernel does not list children
        pass
    found = []
    for pid in pids:
        fields = stat_fields(pid)
        if not fields:
            continue
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read(200).replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        found.append(ChildProcess(pid=pid, state=fields[0].decode(), cpu_s=cpu_s, command=command))
    return found
