"""``helmsman up`` in a terminal: Ctrl-C goes to the whole process group, so the script has had it already."""

from __future__ import annotations

import os
import pty
import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="a cluster is looked for by Ray's client")

from tests.contract.helpers import ROOT, wait_until

PROGRAM = str(Path(__file__).with_name("program.py"))


@pytest.mark.timeout(120)
def test_script_is_interrupted_once(tmp_path: Path) -> None:
    """By the terminal, and not by the supervisor once more, which would interrupt its clean-up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # answers as a cluster that is there, so that no Ray is started
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(ROOT)
            os.execve(
                sys.executable,
                [sys.executable, "-m", "helmsman.controller.cli", "up", "--", sys.executable, PROGRAM, "interrupts"],
                {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT), "RAY_ADDRESS": address},
            )
        printed = b""

        def says(text: bytes) -> bool:
            nonlocal printed
            if text not in printed:
                printed += os.read(terminal, 4096)
            return text in printed

        try:
            wait_until(lambda: says(b"waits"), "the script runs", 60)
            os.write(terminal, b"\x03")
            wait_until(lambda: says(b"interrupted"), "the script was interrupted", 20)
            _, status = os.waitpid(pid, 0)
        finally:
            os.close(terminal)
    assert b"interrupted once" in printed
    assert os.waitstatus_to_exitcode(status) == 130
