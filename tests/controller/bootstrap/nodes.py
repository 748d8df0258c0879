"""Nodes of this machine: their plans, real supervisors over fake Rays, and a cable between them
that can be cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from helmsman.controller._bootstrap.connection import LinkTimeouts
from helmsman.controller._bootstrap.node_plan import NodePlan
from helmsman.controller._bootstrap.settings import NODE_DEFAULTS, cluster_defaults, variables
from helmsman.controller._node.launchers import NodeIdentity
from helmsman.rpc_server.ports import PortLeases
from tests.contract.helpers import ROOT, wait_until
from tests.controller.bootstrap.zygote import Forked, Zygote

HERE = Path(__file__).parent
TIMEOUTS = LinkTimeouts(
    heartbeat_s=0.2, connect_s=1.0, silent_s=5.0, refused_s=0.3, unreachable_s=1.5
)
WAITS = """
import os, signal, sys, time
folder = sys.argv[1]
def stop(number, frame):
    open(os.path.join(folder, f"script-told-{number}"), "w").close()
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
"""A script that goes on until it is let go."""


VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "helmsman": "0.1.0"}


def make_plan(
    folder: Path, *, rank: int = 0, count: int = 1, head: str = "127.0.0.1", **changes: Any
) -> NodePlan:
    """What a node of this machine is to do."""
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
    """The command of a script."""
    return [sys.executable, "-I", "-S", "-c", source]


Start = Callable[[Sequence[str], Mapping[str, str], Path], "subprocess.Popen[bytes] | Forked"]


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
        """Of the program."""
        return self.process.pid

    @property
    def output(self) -> str:
        """All that it has printed."""
        return self._output.read_text(errors="replace")

    @property
    def has_ended(self) -> bool:
        """Whether it has."""
        return self.process.poll() is not None

    def signal(self, number: int) -> None:
        """To the program alone."""
        os.kill(self.pid, number)

    def said(self, text: str, count: int = 1, limit_s: float = 100.0) -> str:
        """Wait until it has printed this so many times; returns all that it has printed."""
        with contextlib.suppress(pytest.fail.Exception):  # its output of the meantime is shown
            wait_until(lambda: self.output.count(text) >= count or self.has_ended, text, limit_s)
        assert self.output.count(text) >= count, f"no {text!r} in:\n{self.output}"
        return self.output

    def wait(self, limit_s: float = 30.0) -> int:
        """Its exit code, 128 and the number of the signal that ended it."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end within {limit_s:g} s:\n{self.output}") from None
        return code if code >= 0 else 128 - code

    def ends(self, code: int, *facts: str, limit_s: float = 30.0) -> None:
        """It ends with this exit code, and has printed all of these."""
        assert self.wait(limit_s) == code, self.output
        for fact in facts:
            assert fact in self.output, f"no {fact!r} in:\n{self.output}"


class Node(Running):
    """A running supervisor."""

    def __init__(self, cluster: Path, plan: NodePlan, name: str, start: Start) -> None:
        self.plan, self._own = plan, cluster / str(plan.identity.rank)
        plan_file = cluster / f"plan-{name}"
        plan_file.write_bytes(pickle.dumps(plan))
        command = [
            sys.executable,
            "-m",
            "tests.controller.bootstrap.supervisor",
            str(plan_file),
            str(cluster),
        ]
        super().__init__(
            command, {**os.environ, "PYTHONPATH": str(ROOT)}, cluster / f"output-{name}", start
        )

    def lines(self, part: str) -> list[str]:
        """Those of its lines that have this in them, without their beginning."""
        return [line.partition("] ")[2] for line in self.output.splitlines() if part in line]

    def ends(self, code: int, *facts: str, limit_s: float = 30.0) -> None:
        """As of any program, and no error was left over."""
        super().ends(code, *facts, limit_s=limit_s)
        for trace in ("Traceback", "never retrieved"):
            assert trace not in self.output, self.output

    @property
    def ray(self) -> dict[str, Any]:
        """The command line and environment of its Ray, once that has started."""
        wait_until((self._own / "started").exists, f"Ray starts:\n{self.output}")
        return dict(json.loads((self._own / "started").read_text()))


class Nodes:
    """Nodes of one run, which share a folder that stands for the cluster.

    Args:
        count: how many there are to be.
        zygote: starts their supervisors.
        changes: of all their plans.
    """

    def __init__(self, folder: Path, count: int, zygote: Zygote, **changes: Any) -> None:
        self.folder, self.count, self._zygote, self._changes = folder, count, zygote, changes
        self._leases = PortLeases()
        self.port = self._leases.lease(1)[0]
        self.started: list[Node] = []
        shutil.copy(str(shutil.which("sleep")), folder / "raylet")

    def behaviour(self, rank: int, *words: str) -> None:
        """What the fake Ray of a rank does; see fake_ray.py."""
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
        self.started.append(Node(self.folder, plan, name, self._zygote.start))
        return self.started[-1]

    def start_all(self) -> list[Node]:
        """All of them, the head first."""
        return [self.start(rank) for rank in range(self.count)]

    def start_running(self, port: int = 0) -> list[Node]:
        """All of them, once the script runs; those above rank 0 reach the head at a port of their
        own, if that is given.
        """
        changes = {"control_port": port} if port else {}
        nodes = [self.start(rank, **(changes if rank else {})) for rank in range(self.count)]
        self.wait_running()
        return nodes

    # --- the script -------------------------------------------------------------------------------

    def waiting_script(self, how: str = "0") -> list[str]:
        """A script that goes on until it is let go. When told to stop it ends with this exit code;
        'deaf' does not.
        """
        return [sys.executable, "-I", "-S", "-c", WAITS, str(self.folder), how]

    def wait_running(self) -> None:
        """Wait until the script runs."""
        told = "\n".join(node.output for node in self.started)
        wait_until((self.folder / "script-started").exists, f"the script starts:\n{told}")

    def release(self) -> None:
        """Let the script end."""
        (self.folder / "script-released").touch()

    def script_was_told(self, number: int) -> bool:
        """Whether it has got this signal."""
        return (self.folder / f"script-told-{int(number)}").exists()

    # --- the end ----------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """Processes that a supervisor has caused, and itself."""
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
        """Fail unless all is gone: guardians go a moment after those whom they guard."""
        wait_until(lambda: not self.left(), f"nothing is left: {self.left()}", 10.0)

    def close(self) -> None:
        """End what is left."""
        for node in self.started:
            node.process.kill()
            node.process.wait()
        self.wait_nothing_left()
        self._leases.close()


class Cable:
    """Carries connections to a port, until it is cut."""

    def __init__(self, port: int) -> None:
        self.target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._silent = False
        self._deserted: set[socket.socket] = set()
        self.is_given_up = threading.Event()
        """Set when the far end has closed what it alone still had."""
        self._ends: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                if self._silent:
                    self._ends.append((near, near))
                    continue
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                self._ends.append((near, far))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                with contextlib.suppress(OSError):
                    # a near end that is closed; the far one is read to its own end
                    sink.sendall(data)
            if source in self._deserted:
                self.is_given_up.set()
        for end in {source, sink} - self._deserted:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def desert(self) -> None:
        """Close what it carries at the near ends alone: the far ones hear nothing of it, as where a
        firewall forgets one.
        """
        for near, far in self._ends:
            self._deserted.add(far)
            with contextlib.suppress(OSError):  # it was cut before
                near.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Close what it carries; new connections go through."""
        for pair in self._ends:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def cut_and_swallow(self) -> None:
        """Close what it carries; new connections are taken, and nothing is heard on them."""
        self._silent = True
        self.cut()

    def close(self) -> None:
        """End it."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for pair in self._ends:
            for end in pair:
                end.close()


MakeNodes = Callable[..., Nodes]
MakeCable = Callable[[int], Cable]
