"""``helmsman up`` in a terminal: Ctrl-C goes to the whole process group, so the script has had it already."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="it starts a Ray of its own")

from tests.contract.helpers import ROOT, wait_until

PROGRAM = str(Path(__file__).with_name("program.py"))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_script_is_interrupted_once(tmp_path: Path) -> None:
    """By the terminal, and not by the supervisor once more, which would break its clean-up off."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(
            sys.executable,
            [sys.executable, "-m", "helmsman.controller.cli", "up", "--", sys.executable, PROGRAM, "interrupts"],
            {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        )
    told = b""

    def says(text: bytes) -> bool:
        nonlocal told
        if text not in told:
            told += os.read(terminal, 4096)
        return text in told

    try:
        wait_until(lambda: says(b"waits"), "the script runs", 60)
        os.write(terminal, b"\x03")
        wait_until(lambda: says(b"interrupted"), "the script was interrupted", 20)
        wait_until(lambda: says(b"the run ends"), "the supervisor goes on to its end", 20)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)
    assert b"interrupted once" in told
    assert os.waitstatus_to_exitcode(status) == 130
