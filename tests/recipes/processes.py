"""Processes of a run, as tests look for them and wait."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil


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
    """Processes that inherited the mark in their environment and are not yet gone."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        except psutil.Error:
            continue
    return found


def wait_for(condition: Callable[[], object], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def run_here(main: Callable[[Sequence[str]], int], flags: Sequence[str]) -> int:
    """Call the main function of a script in this process, which has imported torch already; returns
    its exit code.
    """
    import torch

    num_threads = torch.get_num_threads()
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    torch.set_num_threads(1)
    try:
        return main(flags)
    finally:
        torch.set_num_threads(num_threads)
        for number, handler in handlers.items():
            signal.signal(number, handler)
