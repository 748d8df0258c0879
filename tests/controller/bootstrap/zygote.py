"""Forks Python programs from a process that has imported Helmsman: importing it costs more than
most of them do.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from tests.contract.helpers import ROOT


class Forked:
    """A forked program, with the part of ``subprocess.Popen`` that the tests need."""

    def __init__(self, pid: int, code: Path) -> None:
        self.pid, self._code = pid, code

    def poll(self) -> int | None:
        return int(self._code.read_text()) if self._code.exists() else None

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Zygote:
    """The process that forks."""

    def __init__(self) -> None:
        command, environ = [sys.executable, "-m", __name__], {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, command: Sequence[str], environ: Mapping[str, str], output: Path) -> Forked:
        """Start ``python -m MODULE ARGUMENTS``, by the function ``main`` of that module, in a
        session of its own.
        """
        _, _, *argv = command
        code = output.with_name(f"{output.name}-code")
        request = {"argv": argv, "environ": dict(environ), "output": str(output), "code": str(code)}
        output.touch()  # the test may read it before the program has opened it
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Forked(int(self._process.stdout.readline()), code)

    def close(self) -> None:
        self._process.communicate(timeout=30)


def _serve() -> None:
    """Fork a program for each line of stdin; runs on in each child, too."""
    importlib.import_module("helmsman.controller.cli")
    importlib.import_module("tests.controller.bootstrap.supervisor")
    codes: dict[int, str] = {}

    def reap(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG):
                if not ended[0]:
                    break
                path = codes.pop(ended[0])
                Path(f"{path}.new").write_text(str(os.waitstatus_to_exitcode(ended[1])))
                os.rename(f"{path}.new", path)

    signal.signal(signal.SIGCHLD, reap)
    while line := sys.stdin.readline():
        request = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        else:
            codes[pid] = request["code"]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if not pid:
            _become(**request)
        print(pid, flush=True)


def _become(argv: list[str], environ: dict[str, str], output: str, code: str) -> None:
    os.setsid()
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    sys.argv, sys.orig_argv = argv, [sys.executable, "-m", *argv]
    sys.exit(importlib.import_module(argv[0]).main())


if __name__ == "__main__":
    _serve()
