"""Test the CPU time that a process reports about its descendants."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from helmsman.rpc_server._host.examination import descendants_s


def test_descendants_s_counts_children_of_children() -> None:
    """A method makes progress while a compiler that it has started computes."""
    shell = ["sh", "-c", f"{sys.executable} -c 'while True: pass'; true"]
    before = descendants_s(os.getpid())
    child = subprocess.Popen(shell, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while descendants_s(os.getpid()) < before + 0.2:
            assert time.monotonic() < deadline
    finally:
        os.killpg(child.pid, 9)
        child.wait()
