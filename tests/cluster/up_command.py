"""Fixtures: ``helmsman up`` as a command, and the address of an existing cluster."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.nodes import Running, execute, fork
from tests.contract.helpers import ROOT

UP = (sys.executable, "-m", "helmsman._cli", "up")


PROGRAM = ("--", sys.executable, "-I", "-S", "-c")


PROGRAMS = ("--", sys.executable, str(Path(__file__).with_name("program.py")))


Up = Callable[..., Running]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """Run ``helmsman up`` in an environment without launcher, below a program."""
    started: list[Running] = []
    temporary = tempfile.mkdtemp(prefix="hu-")  # short, for the paths of sockets
    usual = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "TMPDIR": temporary,
        "PYTHONPATH": str(ROOT),
    }

    def start(*arguments: str, below: Sequence[str] = (), **environ: str) -> Running:
        output = tmp_path / f"output-{len(started)}"
        started.append(
            Running(
                [*below, *UP, *arguments],
                {**usual, **environ},
                output,
                start=execute if below else fork,
            )
        )
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.wait()
        assert "Traceback" not in running.output, running.output
    left = [
        path
        for path in Path(temporary).rglob("*")
        if not path.is_dir() or path.name.startswith("hm-")
    ]
    shutil.rmtree(temporary)
    assert not left, "the folder or the record of the run"


@pytest.fixture
def address() -> Iterator[str]:
    """Address of a listener, which accepts connections as an existing Ray cluster does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
