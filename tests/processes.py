"""What tests ask of processes that may end at any moment."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process) -> str:
    """Its command line, "" if it has ended, reaped or not."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
