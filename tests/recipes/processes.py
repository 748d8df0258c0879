"""Finds the processes of a run, kills its workers, and waits for both."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil


def num_steps(out: Path) -> int:
    """Number of steps that a run has recorded."""
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def pids_of(role: str, out: Path) -> list[int]:
    """Processes of a role's workers: those that have their log open."""
    found = []
    for process in psutil.process_iter():
        try:
            logs = {os.path.realpath(f"/proc/{process.pid}/fd/{number}") for number in (1, 2)}
        except OSError:
            continue
        if any(f"/logs/{role}-" in log and log.startswith(str(out.resolve())) for log in logs):
            found.append(process.pid)
    return found


def marked(mark: str) -> list[str]:
    """Live processes that inherited the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        except psutil.Error:
            continue
    return found


def wait_for(condition: Callable[[], object], limit_s: float) -> None:
    """Return when the condition is true, or after the limit."""
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def finish(
    process: subprocess.Popen[str], out: Path, kills: Sequence[tuple[str, int]] = ()
) -> tuple[str, int]:
    """Kill workers of a run, and wait for its end.

    Args:
        process: The run, with its stdout in a pipe.
        out: Its output folder.
        kills: Role of which a worker is killed, and the number of recorded steps to wait for.

    Returns:
        The output of the run, and the number of workers killed.
    """
    killed: list[int] = []

    def victims(role: str) -> set[int]:
        return set(pids_of(role, out)).difference(killed)

    try:
        for role, at in kills:
            wait_for(lambda at=at: process.poll() is not None or num_steps(out) > at, 120.0)  # type: ignore[misc]
            wait_for(lambda role=role: process.poll() is not None or victims(role), 60.0)  # type: ignore[misc]
            if process.poll() is None:
                killed.append(max(victims(role)))
                os.kill(killed[-1], signal.SIGKILL)
        printed, _ = process.communicate(timeout=200.0)
    finally:
        process.kill()
    assert process.returncode == 0, printed
    return printed, len(killed)


def run_here(main: Callable[[Sequence[str]], int], flags: Sequence[str]) -> int:
    """Call the main function of a script in this process, and restore the handlers of signals;
    returns its exit code.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        return main(flags)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
