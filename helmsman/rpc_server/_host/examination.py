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
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from helmsman.api.run_state import Frame, ProcessReport, StackTrace
from helmsman.rpc_server._host.collectives import last_collectives, waiting_nccl_ranks
from helmsman.rpc_server._host.threads import (
    EngineLoop,
    EngineThread,
    Running,
    awaited_frames,
    frames_of,
)
from helmsman.rpc_server._process.guardian import process_of

_MOST_FRAMES = 60
_MOST_TASKS = 50
_THREADS = Path("/proc/self/task")
_TICKS = os.sysconf("SC_CLK_TCK")
_OF_RUN = re.compile(r"^(helmsman|ray):|helmsman\.rpc_server|/ray/")
"""Pattern of the commands of processes that Helmsman and Ray start."""
_CLOCK_AHEAD_S = time.time() - time.monotonic()
"""Changes only when the node's clock is set."""


def examine(
    node: str, log_dir: str, engine_thread: EngineThread, loop: EngineLoop
) -> ProcessReport:
    """Report on a worker's process, its node, and the disk of its logs."""
    stacks, frames = [], sys._current_frames()
    if engine_thread.thread is not None and engine_thread.thread.ident in frames:
        shown = frames_of(frames[engine_thread.thread.ident], skip_own=True)
        stacks.append(_stack("engine", shown, engine_thread.occupant))
    tasks = sorted(loop.running.values(), key=lambda each: each.since)[:_MOST_TASKS]
    stacks += [_stack("task", awaited_frames(e.task), e) for e in tasks if e.task is not None]
    if loop.occupant is not None and loop.thread is not None and loop.thread.ident in frames:
        # A coroutine blocks the loop.
        shown = frames_of(frames[loop.thread.ident], skip_own=True)
        stacks.append(_stack("loop", shown, loop.occupant))
    return _report(node, log_dir, stacks)


def examine_script(node: str, log_dir: str) -> ProcessReport:
    """Report on the script's process: the main thread, the tasks of its loop and other threads."""
    stacks: list[StackTrace] = []
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, "?")
        if ident == threading.main_thread().ident:
            stacks.insert(0, _stack("main", frames_of(frame)))
            for task in _tasks_of(frame):
                coroutine = getattr(task.get_coro(), "__qualname__", "task")
                stacks.append(_stack(f"task {coroutine}", awaited_frames(task)))
        elif not name.startswith("helmsman"):
            stacks.append(_stack(name, frames_of(frame)))
    return _report(node, log_dir, stacks[:_MOST_TASKS])


def thread_stack_of(name: str) -> StackTrace | None:
    """Return the stack of a thread of this process by name; None if there is none."""
    frames, named = sys._current_frames(), (e for e in threading.enumerate() if e.name == name)
    found = (frames[each.ident] for each in named if each.ident in frames)
    return next((_stack(name, frames_of(frame)) for frame in found), None)


def _tasks_of(frame: FrameType) -> Iterable[asyncio.Task[object]]:
    """Return the tasks of the event loop that a thread runs."""
    for each in frames_of(frame):
        loop = each.f_locals.get("self") if each.f_code.co_name == "run_forever" else None
        if isinstance(loop, asyncio.AbstractEventLoop):
            return asyncio.all_tasks(loop)
    return ()


def _stack(thread: str, frames: list[FrameType], running: Running | None = None) -> StackTrace:
    found = []
    for frame in frames[-_MOST_FRAMES:]:
        file, line = frame.f_code.co_filename, frame.f_lineno
        text = linecache.getline(file, line, frame.f_globals).strip()
        found.append(Frame(file, line, frame.f_code.co_name, text[:200]))
    call = running.name if running is not None else ""
    running_s = time.monotonic() - running.since if running is not None else None
    return StackTrace(thread=thread, frames=found, call=call, running_s=running_s)


def _report(node: str, log_dir: str, stacks: list[StackTrace]) -> ProcessReport:
    used = [resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    sizes, collectives = _sizes("/proc/self/status"), last_collectives()
    return ProcessReport(
        pid=os.getpid(),
        cpu_s=sum(each.ru_utime + each.ru_stime for each in used) + descendants_s(os.getpid()),
        rss_bytes=sizes.get("VmRSS", 0),
        swap_bytes=sizes.get("VmSwap", 0),
        runnable_s=_runnable_s(),
        clock_jump_s=time.time() - time.monotonic() - _CLOCK_AHEAD_S,
        stacks=stacks,
        children=_children(int(time.monotonic())),
        node=node,
        **node_facts(log_dir),
        collectives=collectives,
        nccl_ranks=waiting_nccl_ranks(collectives),
    )


def node_facts(log_dir: str) -> dict[str, Any]:
    """Return the fields of a report about this node, and about the disk of a run's logs."""
    disks = {}
    for path in ("/dev/shm", tempfile.gettempdir(), log_dir):
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(path)
            disks[path] = (usage.free, usage.total)
    return {"memory_available": _sizes("/proc/meminfo").get("MemAvailable", 0), "disks": disks}


def proc_text(path: str | Path) -> str:
    """Return the text of a file of /proc; '' if there is none."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


def _sizes(path: str) -> dict[str, int]:
    """Return the sizes of a file of /proc in bytes by name."""
    found = re.findall(r"^(\w+):\s+(\d+) kB", proc_text(path), re.MULTILINE)
    return {name: int(size) << 10 for name, size in found}


def _runnable_s() -> float:
    """Return the time that the threads spent in the run queue."""
    found = [proc_text(each).split() for each in _THREADS.glob("*/schedstat")]
    return sum(int(fields[1]) for fields in found if len(fields) > 1) / 1e9


def descendants_s(pid: int) -> float:
    """Return the CPU seconds of the living descendants, but not of Helmsman's and Ray's."""
    total_s = 0.0
    for child in _children_of(pid):
        if not _OF_RUN.search(proc_text(f"/proc/{child}/cmdline")):
            fields = proc_text(f"/proc/{child}/stat").rpartition(")")[2].split()
            total_s += sum(map(int, fields[11:15])) / _TICKS + descendants_s(child)
    return total_s


def _children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return list(map(int, " ".join(map(proc_text, found)).split()))


@functools.lru_cache(maxsize=1)
def _children(second: int) -> dict[int, tuple[str, str]]:
    """Return the direct children, once a second: inline workers share one process."""
    found = {}
    for pid in _children_of(os.getpid()):
        command = proc_text(f"/proc/{pid}/cmdline")[:200].replace("\0", " ").strip()
        if (process := process_of(pid)) is not None:
            found[pid] = process.state, command
    return found
