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
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from helmsman._process.guardian import proc_text, process_of
from helmsman._process.pulse import recent_pauses_s
from helmsman.api.run_state import Frame, ProcessReport, Progress, StackTrace
from helmsman.rpc_server._host import progress
from helmsman.rpc_server._host.collectives import last_collectives, waiting_nccl_ranks
from helmsman.rpc_server._host.threads import (
    EngineLoop,
    EngineThread,
    Running,
    awaited_frames,
    frames_of,
)

_MOST_FRAMES = 60
_MOST_TASKS = 50
_TICKS = os.sysconf("SC_CLK_TCK")
_OF_RUN = re.compile(r"^(helmsman|ray):|helmsman\.rpc_server|/ray/")
"""Pattern of the commands of processes that Helmsman and Ray start."""
_FORKSERVER = re.compile(r"^helmsman: forkserver|helmsman\.rpc_server\._server\.forkserver")
"""Pattern of its command, which has a title if setproctitle is installed."""
_run_queue = progress.RunQueue()
_CLOCK_AHEAD_S = time.time() - time.monotonic()
"""Changes only when the node's clock is set."""


def examine(
    node: str,
    log_dir: str,
    engine_thread: EngineThread,
    loop: EngineLoop,
    connections: progress.Connections | None,
) -> ProcessReport:
    """Report on a worker's process, its node, and the disk of its logs."""
    stacks, frames = [], sys._current_frames()
    thread, occupant = engine_thread.thread, engine_thread.occupant
    if thread is not None and thread.ident in frames:
        shown = frames_of(frames[thread.ident], skip_own=True)
        stacks.append(_stack("engine", shown, _of_thread(thread), occupant))
    tasks = sorted(loop.running.values(), key=lambda each: each.since)[:_MOST_TASKS]
    stacks += [_task_stack("task", each.task, each) for each in tasks if each.task is not None]
    thread, occupant = loop.thread, loop.occupant
    if occupant is not None and thread is not None and thread.ident in frames:
        # A coroutine blocks the loop.
        shown = frames_of(frames[thread.ident], skip_own=True)
        stacks.append(_stack("loop", shown, _of_thread(thread), occupant))
    quiet_s = connections.quiet_s() if connections is not None else None
    return _report(node, log_dir, stacks, quiet_s)


def examine_script(node: str, log_dir: str) -> ProcessReport:
    """Report on the script's process: the main thread, the tasks of its loop and other threads."""
    stacks: list[StackTrace] = []
    threads = {each.ident: each for each in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        thread = threads.get(ident)
        name = thread.name if thread is not None else "?"
        if thread is threading.main_thread():
            stacks.insert(0, _stack("main", frames_of(frame), _of_thread(thread)))
            for task in _tasks_of(frame):
                coroutine = getattr(task.get_coro(), "__qualname__", "task")
                stacks.append(_task_stack(f"task {coroutine}", task))
        elif not name.startswith("helmsman"):
            stacks.append(_stack(name, frames_of(frame), _of_thread(thread)))
    report = _report(node, log_dir, stacks[:_MOST_TASKS])
    return msgspec.structs.replace(report, forkserver=_forkserver())


def _forkserver() -> Progress | None:
    """Return the progress of this process's forkserver and of the workers that it forked."""
    children = ((each, proc_text(f"/proc/{each}/cmdline")) for each in _children_of(os.getpid()))
    pid = next((pid for pid, command in children if _FORKSERVER.search(command)), None)
    if pid is None:
        return None
    family = [pid, *_descendants(pid, of_run=True)]
    return Progress(
        number=pid,
        cpu_s=sum(map(_cpu_s, family)),
        moved_bytes=sum(progress.moved_by(f"/proc/{each}") for each in family),
    )


def thread_stack_of(name: str) -> StackTrace | None:
    """Return the stack of a thread of this process by name; None if there is none."""
    frames, named = sys._current_frames(), (e for e in threading.enumerate() if e.name == name)
    found = ((e, frames[e.ident]) for e in named if e.ident in frames)
    return next((_stack(name, frames_of(frame), _of_thread(e)) for e, frame in found), None)


def _tasks_of(frame: FrameType) -> Iterable[asyncio.Task[object]]:
    """Return the tasks of the event loop that a thread runs."""
    for each in frames_of(frame):
        loop = each.f_locals.get("self") if each.f_code.co_name == "run_forever" else None
        if isinstance(loop, asyncio.AbstractEventLoop):
            return asyncio.all_tasks(loop)
    return ()


def _of_thread(thread: threading.Thread | None) -> Progress | None:
    """Return the progress of a thread. Until Python 3.13, a forked one has its parent's id."""
    is_main = thread is threading.main_thread()
    number = os.getpid() if is_main else thread.native_id if thread is not None else None
    return progress.of_thread(number) if number is not None else None


def _task_stack(name: str, task: asyncio.Task[Any], running: Running | None = None) -> StackTrace:
    frames = awaited_frames(task)
    return _stack(name, frames, progress.of_task(task, frames), running)


def _stack(
    thread: str,
    frames: list[FrameType],
    made: Progress | None,
    running: Running | None = None,
) -> StackTrace:
    found = []
    for frame in frames[-_MOST_FRAMES:]:
        file, line = frame.f_code.co_filename, frame.f_lineno
        text = linecache.getline(file, line, frame.f_globals).strip()
        found.append(Frame(file, line, frame.f_code.co_name, text[:200]))
    call = running.name if running is not None else ""
    running_s = time.monotonic() - running.since if running is not None else None
    return StackTrace(thread=thread, frames=found, call=call, running_s=running_s, progress=made)


def _report(
    node: str, log_dir: str, stacks: list[StackTrace], quiet_s: float | None = None
) -> ProcessReport:
    sizes, collectives = _sizes("/proc/self/status"), last_collectives()
    return ProcessReport(
        pid=os.getpid(),
        rss_bytes=sizes.get("VmRSS", 0),
        swap_bytes=sizes.get("VmSwap", 0),
        **_counts(int(time.monotonic())),
        quiet_s=quiet_s,
        pauses_s=recent_pauses_s(),
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


def _sizes(path: str) -> dict[str, int]:
    """Return the sizes of a file of /proc in bytes by name."""
    found = re.findall(r"^(\w+):\s+(\d+) kB", proc_text(path), re.MULTILINE)
    return {name: int(size) << 10 for name, size in found}


def descendants_s(pid: int) -> float:
    """Return the CPU seconds of the living descendants, but not of Helmsman's and Ray's."""
    return sum(map(_cpu_s, _descendants(pid)))


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, and of its children that have ended."""
    fields = proc_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


def _descendants(pid: int, *, of_run: bool = False) -> Iterator[int]:
    """Yield the living descendants; those of Helmsman and Ray only if asked."""
    for child in _children_of(pid):
        if of_run or not _OF_RUN.search(proc_text(f"/proc/{child}/cmdline")):
            yield child
            yield from _descendants(child, of_run=of_run)


def _children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return list(map(int, " ".join(map(proc_text, found)).split()))


@functools.lru_cache(maxsize=1)
def _counts(second: int) -> dict[str, Any]:
    """Return the fields of a report about all threads and descendants, once a second."""
    used = [resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    children = [f"/proc/{each}" for each in _descendants(os.getpid())]
    return {
        "cpu_s": sum(each.ru_utime + each.ru_stime for each in used) + descendants_s(os.getpid()),
        "runnable_s": _run_queue.waited_s(["/proc/self", *children]),
        "moved_bytes": progress.moved_bytes(),
        "children_bytes": sum(map(progress.moved_by, children)),
    }


@functools.lru_cache(maxsize=1)
def _children(second: int) -> dict[int, tuple[str, str]]:
    """Return the direct children, once a second: inline workers share one process."""
    found = {}
    for pid in _children_of(os.getpid()):
        command = proc_text(f"/proc/{pid}/cmdline")[:200].replace("\0", " ").strip()
        if (process := process_of(pid)) is not None:
            found[pid] = process.state, command
    return found
