"""Runs with staged faults, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

STAGED = Path(__file__).with_name("staged.py")


class Staged(NamedTuple):
    """A run that hangs."""

    run_id: str
    process: subprocess.Popen[str]
    address: str = ""
    """Of its Ray cluster."""


def start(*arguments: str, script: Path = STAGED) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(STAGED.parents[3]), "RAY_AUTH_MODE": "disabled"},
    )


def run_of(process: subprocess.Popen[str]) -> Staged:
    assert process.stdout is not None
    address = ""
    for line in process.stdout:
        word, _, value = line.strip().partition(" ")
        if word == "address":
            address = value
        elif word == "run":
            return Staged(value, process, address)
    raise AssertionError(f"{process.args!r} ended with {process.wait()} before it hung")


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def stage() -> Iterator[Callable[[str], Staged]]:
    """Start a run with a fault, and wait until it hangs."""
    processes = []

    def begin(fault: str) -> Staged:
        processes.append(start(fault))
        return run_of(processes[-1])

    yield begin
    for process in processes:
        end(process)
