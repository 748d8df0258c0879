"""Hosts on one machine: namespaces of network, processes, mounts, shared memory and host names.

The hosts share one switch. Their namespaces end with their processes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.nodes import Running
from tests.contract.helpers import ROOT, wait_until

_NETWORK = "10.77.0"
_SHM = "size=1500m"


def why_not_here() -> str:
    """Return the reason why this machine cannot have hosts, '' if it can."""
    if os.geteuid() != 0:
        return "hosts are made of namespaces, which needs root"
    if not (shutil.which("ip") and shutil.which("unshare") and shutil.which("nsenter")):
        return "hosts are made with ip, unshare and nsenter (iproute2 and util-linux)"
    made = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"this machine makes no namespaces: {made.stderr.strip()}" if made.returncode else ""


class Command(Running):
    """A program on a host; its parent is nsenter."""

    @property
    def pid(self) -> int:
        """Process id of the program outside of the host."""
        children = _children(self.process.pid)
        return children[0] if children else self.process.pid


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


class Host:
    """A host."""

    def __init__(
        self, name: str, address: str, init: subprocess.Popen[bytes], folder: Path
    ) -> None:
        self.name, self.address, self._init, self.folder = name, address, init, folder
        self._commands: list[Command] = []

    @property
    def pid(self) -> int:
        """Process id of its first process."""
        return _children(self._init.pid)[0]

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> Command:
        """Start a program on the host."""
        output = self.folder / f"output-{len(self._commands)}"
        environ = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder),
            **(env or {}),
        }
        on_host = ["nsenter", "--target", str(self.pid), "--all", "--wd=/", "--", *command]
        self._commands.append(Command(on_host, environ, output))
        return self._commands[-1]

    def do(self, *command: str) -> None:
        """Run a program on the host to its end."""
        self.start(*command).ends(0)

    def up(self, *arguments: str, env: Mapping[str, str] | None = None) -> Command:
        """Start ``helmsman up`` on the host."""
        return self.start(sys.executable, "-m", "helmsman._cli", "up", *arguments, env=env)

    def processes(self) -> dict[int, str]:
        """Return the command lines of all processes but the first, by process id outside."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != self.pid:
                try:
                    if os.readlink(f"/proc/{entry}/ns/pid") == space:
                        found[int(entry)] = (
                            Path(f"/proc/{entry}/cmdline")
                            .read_bytes()
                            .replace(b"\0", b" ")
                            .decode()
                        )
                except OSError:
                    continue
        return {pid: line for pid, line in found.items() if line}

    def pid_of(self, program: str) -> int:
        """Return the process id of the only process that runs this program."""
        (pid,) = [
            pid
            for pid, line in self.processes().items()
            if os.path.basename(line.partition(" ")[0]) == program
        ]
        return pid

    def left(self) -> list[str]:
        """Return the remains of a run: processes, and files except logs."""
        files = [str(path) for path in self.folder.glob("hm-*")] + os.listdir(
            f"/proc/{self.pid}/root/dev/shm"
        )
        return [*self.processes().values(), *files]


class Hosts:
    """Hosts on a switch; the first is rank 0."""

    def __init__(self, count: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp"))
        self._switch = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self.all: list[Host] = []
        try:
            wait_until(lambda: _is_apart(self._switch.pid, "net"), "the switch has its own network")
            self._on_switch("link", "add", "br0", "type", "bridge")
            self._on_switch("link", "set", "br0", "up")
            for index in range(count):
                self.all.append(self._make(index))
        except BaseException:
            self.close()
            raise

    def __getitem__(self, index: int) -> Host:
        return self.all[index]

    def _on_switch(self, *arguments: str) -> None:
        subprocess.run(
            ["nsenter", "--target", str(self._switch.pid), "--net", "ip", *arguments], check=True
        )

    def _make(self, index: int) -> Host:
        name, address = f"host{index}", f"{_NETWORK}.{index + 1}"
        folder = self._folder / str(index)
        folder.mkdir()
        names = folder / "hosts"
        names.write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{_NETWORK}.{other + 1} host{other}\n" for other in range(16))
        )
        prepare = (
            f"mount -t proc proc /proc && mount -t tmpfs -o {_SHM} tmpfs /dev/shm && mount --bind "
            f"{names} /etc/hosts && "
            f"hostname {name} && ip link set lo up && exec sleep infinity"
        )
        init = subprocess.Popen(
            [
                "unshare",
                "--net",
                "--pid",
                "--mount",
                "--ipc",
                "--uts",
                "--fork",
                "--kill-child",
                "sh",
                "-c",
                prepare,
            ]
        )
        host = Host(name, address, init, folder)
        wait_until(
            lambda: bool(_children(init.pid)) and _command(host.pid).startswith("sleep"),
            f"{name} is there",
        )
        self._on_switch(
            "link",
            "add",
            f"to{index}",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(host.pid),
        )
        self._on_switch("link", "set", f"to{index}", "master", "br0", "up")
        host.do("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        host.do("ip", "link", "set", "eth0", "up")
        host.do("ip", "route", "add", "default", "via", f"{_NETWORK}.254")
        return host

    def cut(self, index: int) -> None:
        """Cut the link of a host."""
        self._on_switch("link", "set", f"to{index}", "down")

    def close(self) -> None:
        """End all hosts."""
        for command in [command for host in self.all for command in host._commands]:
            command.process.kill()
            command.process.wait()
        for process in [*(host._init for host in self.all), self._switch]:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _is_apart(pid: int, space: str) -> bool:
    return os.readlink(f"/proc/{pid}/ns/{space}") != os.readlink(f"/proc/self/ns/{space}")


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
