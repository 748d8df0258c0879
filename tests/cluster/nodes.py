"""Nodes on this machine: plans, and supervisors over fake Rays."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from helmsman._cluster.connection import LinkTimeouts
from helmsman._cluster.node_plan import NodePlan
from helmsman._cluster.settings import NODE_DEFAULTS, cluster_defaults, variables
from helmsman._process.launchers import NodeIdentity
from helmsman._process.ports import PortLeases
from tests import zygote
from tests.contract.helpers import ROOT, wait_until

HERE = Path(__file__).parent
TIMEOUTS = LinkTimeouts(heartbeat_s=0.2, connect_s=1.0, silent_s=5.0)
WAITS = """
import os, signal, sys, time
folder = sys.argv[1]
def stop(number, frame):
    open(os.path.join(folder, f"script-received-{number}"), "w").close()
    sys.exit(int(sys.argv[2]))
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
open(os.path.join(folder, "script-started"), "w").close()
while not os.path.exists(os.path.join(folder, "script-released")):
    time.sleep(0.01)
"""
"""A script that runs until it is released."""


VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "helmsman": "0.1.0"}


def make_plan(
    folder: Path, *, rank: int = 0, count: int = 1, head: str = "127.0.0.1", **changes: Any
) -> NodePlan:
    """Return the plan of a node on this machine."""
    fields: dict[str, Any] = {
        "run_id": f"run-of-{rank}",
        "identity": NodeIdentity(launcher="flags", rank=rank, count=count, head=head),
        "command": [sys.executable, "-c", "pass"],
        "address": "127.0.0.1",
        "port": 6379,
        "control_port": 6380 if count > 1 else 0,
        "secret": "a token of this test",
        "versions": VERSIONS,
        "num_devices": 0,
        "device_kind": "GPU",
        "resources": {"CPU": 2.0},
        "store_bytes": 1 << 28,
        "cluster_settings": variables(cluster_defaults(count), {}, {}),
        "node_settings": variables(NODE_DEFAULTS, {}, {}),
        "timeout_s": 20.0,
        "grace_s": 2.0,
        "folder": folder,
    }
    return NodePlan(**{**fields, **changes})


def script(source: str) -> list[str]:
    """Return the command of a script."""
    return [sys.executable, "-I", "-S", "-c", source]


Process = subprocess.Popen[bytes] | zygote.Program
Start = Callable[[Sequence[str], Mapping[str, str], Path], Process]
PRELOAD = ("helmsman._cli", "tests.cluster.supervisor")


def execute(
    command: Sequence[str], environ: Mapping[str, str], output: Path
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own."""
    with output.open("wb") as file:
        return subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def fork(command: Sequence[str], environ: Mapping[str, str], output: Path) -> zygote.Program:
    """Fork a Python program from the zygote, in a session of its own."""
    with output.open("wb") as file:
        return zygote.start(command, env=environ, stdout=file, preload=PRELOAD)


class Running:
    """A program whose output goes to a file."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        output: Path,
        start: Start = execute,
    ) -> None:
        self._output = output
        self.process = start(command, environ, output)

    @property
    def pid(self) -> int:
        """Process id of the program."""
        return self.process.pid

    @property
    def output(self) -> str:
        """Its output until now."""
        return self._output.read_text(errors="replace")

    @property
    def has_ended(self) -> bool:
        """Whether the program has ended."""
        return self.process.poll() is not None

    def signal(self, number: int) -> None:
        """Send a signal to the program alone."""
        os.kill(self.pid, number)

    def said(self, text: str, count: int = 1, limit_s: float = 100.0) -> str:
        """Wait until it has printed a text ``count`` times, and return its output."""
        with contextlib.suppress(pytest.fail.Exception):  # the assertion shows the output
            wait_until(lambda: self.output.count(text) >= count or self.has_ended, text, limit_s)
        assert self.output.count(text) >= count, f"no {text!r} in:\n{self.output}"
        return self.output

    def wait(self, limit_s: float = 30.0) -> int:
        """Return its exit code, or 128 plus the number of the signal that ended it."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end within {limit_s:g} s:\n{self.output}") from None
        return code if code >= 0 else 128 - code

    def ends(self, code: int, *facts: str, limit_s: float = 30.0) -> None:
        """Check that it ends with this exit code, and has printed these facts."""
        assert self.wait(limit_s) == code, self.output
        for fact in facts:
            assert fact in self.output, f"no {fact!r} in:\n{self.output}"


class Node(Running):
    """A running supervisor."""

    def __init__(self, cluster: Path, plan: NodePlan, name: str) -> None:
        self.plan, self._own = plan, cluster / str(plan.identity.rank)
        plan_file = cluster / f"plan-{name}"
        plan_file.write_bytes(pickle.dumps(plan))
        command = [
            sys.executable,
            "-m",
            "tests.cluster.supervisor",
            str(plan_file),
            str(cluster),
        ]
        super().__init__(
            command, {**os.environ, "PYTHONPATH": str(ROOT)}, cluster / f"output-{name}", fork
        )

    def lines(self, part: str) -> list[str]:
        """Return its lines that contain a text, without their prefix."""
        return [line.partition("] ")[2] for line in self.output.splitlines() if part in line]

    def ends(self, code: int, *facts: str, limit_s: float = 30.0) -> None:
        """Check its exit code and output, and that it has logged no error."""
        super().ends(code, *facts, limit_s=limit_s)
        for trace in ("Traceback", "never retrieved"):
            assert trace not in self.output, self.output

    @property
    def ray(self) -> dict[str, Any]:
        """Wait for its Ray, and return the command line and environment."""
        wait_until((self._own / "started").exists, f"Ray starts:\n{self.output}")
        return dict(json.loads((self._own / "started").read_text()))


class Nodes:
    """Nodes of one run; a shared folder stands for the cluster.

    Args:
        count: Number of nodes of the run.
        changes: Fields of all plans.
    """

    def __init__(self, folder: Path, count: int, **changes: Any) -> None:
        self.folder, self.count, self._changes = folder, count, changes
        self._leases = PortLeases()
        self.port = self._leases.lease(1)[0]
        self.started: list[Node] = []
        shutil.copy(str(shutil.which("sleep")), folder / "raylet")

    def behaviour(self, rank: int, *words: str) -> None:
        """Set the behaviour of the fake Ray of a rank; see fake_ray.py."""
        (self.folder / str(rank)).mkdir(exist_ok=True)
        (self.folder / str(rank) / "behaviour").write_text(" ".join(words))

    def start(self, rank: int, **changes: Any) -> Node:
        """Start a node."""
        name = f"{rank}-{len(self.started)}"
        fields: dict[str, Any] = {
            "run_id": secrets.token_hex(5),
            "count": self.count,
            "control_port": self.port if self.count > 1 else 0,
            "command": self.waiting_script(),
            "timeouts": TIMEOUTS,
            "ray_command": [
                sys.executable,
                "-I",
                "-S",
                str(HERE / "fake_ray.py"),
                str(self.folder),
            ],
            **self._changes,
            **changes,
        }
        plan = make_plan(self.folder / f"run-{name}", rank=rank, **fields)
        self.started.append(Node(self.folder, plan, name))
        return self.started[-1]

    def start_all(self) -> list[Node]:
        """Start all nodes, the head first."""
        return [self.start(rank) for rank in range(self.count)]

    def start_running(self) -> list[Node]:
        """Start all nodes, and wait for the script."""
        nodes = self.start_all()
        self.wait_running()
        return nodes

    # --- the script -------------------------------------------------------------------------------

    def waiting_script(self, how: str = "0") -> list[str]:
        """Return a script that runs until it is released.

        Args:
            how: Exit code after SIGTERM or SIGINT; "deaf" ignores SIGTERM.
        """
        return [sys.executable, "-I", "-S", "-c", WAITS, str(self.folder), how]

    def wait_running(self) -> None:
        """Wait until the script runs."""
        told = "\n".join(node.output for node in self.started)
        wait_until((self.folder / "script-started").exists, f"the script starts:\n{told}")

    def release(self) -> None:
        """Release the script."""
        (self.folder / "script-released").touch()

    def script_received(self, number: int) -> bool:
        """Whether the script has received this signal."""
        return (self.folder / f"script-received-{int(number)}").exists()

    # --- the end ----------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """Return the supervisors and their processes that still run."""
        ids = [node.plan.run_id for node in self.started]
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                told = " ".join(process.cmdline()) + str(
                    process.environ().get("HELMSMAN_WORKER_TAG")
                )
                if process.status() != psutil.STATUS_ZOMBIE and (
                    any(one in told for one in ids) or str(self.folder) in told
                ):
                    found.append(f"{process.pid}: {told[:200]}")
        return found

    def wait_nothing_left(self) -> None:
        """Wait until nothing is left: guardians end after their processes."""
        wait_until(lambda: not self.left(), f"nothing is left: {self.left()}", 10.0)

    def close(self) -> None:
        """End the supervisors, and wait until nothing is left."""
        for node in self.started:
            node.process.kill()
            node.process.wait()
        self.wait_nothing_left()
        self._leases.close()


MakeNodes = Callable[..., Nodes]
