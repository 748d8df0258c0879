"""Hosts on one machine: network, process, mount, shared-memory and host-name spaces of their own, on one switch.

Nothing outside is touched: the spaces vanish with their processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.contract.helpers import wait_until

REPOSITORY = Path(__file__).resolve().parents[3]
_NETWORK = "10.77.0"
_SHM = "size=1500m"


def why_not_here() -> str:
    """Why hosts cannot be made on this machine; '' where they can."""
    if os.geteuid() != 0:
        return "hosts are made of namespaces, which needs root"
    if not (shutil.which("ip") and shutil.which("unshare") and shutil.which("nsenter")):
        return "hosts are made with ip, unshare and nsenter (iproute2 and util-linux)"
    made = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--fork", "true"], capture_output=True, text=True, check=False
    )
    return f"this machine makes no namespaces: {made.stderr.strip()}" if made.returncode else ""


class Command:
    """A program that runs on a host."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process, self._output = process, output

    @property
    def pid(self) -> int:
        """Of the program itself, as seen from here; nsenter waits for it."""
        children = _children(self._process.pid)
        return children[0] if children else self._process.pid

    def signal(self, number: int) -> None:
        """To the program alone."""
        os.kill(self.pid, number)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped for a while; nsenter stops with it."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in (self.pid, self._process.pid):
                os.kill(pid, signal.SIGCONT)

    def end(self) -> None:
        """By force."""
        self._process.kill()
        self._process.wait()

    def wait(self, limit_s: float) -> int:
        """Its exit code, 128 and the number of the signal that ended it."""
        code = self._process.wait(limit_s)
        return code if code >= 0 else 128 - code

    @property
    def has_ended(self) -> bool:
        """Whether it has."""
        return self._process.poll() is not None

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._output.read_text(errors="replace")

    def said(self, text: str, limit_s: float = 60.0) -> str:
        """Wait until it has printed this; returns all that it has printed."""
        wait_until(lambda: text in self.output or self.has_ended, f"{text!r} in {self.output}", limit_s)
        assert text in self.output, self.output
        return self.output


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


class Host:
    """One of them."""

    def __init__(self, name: str, address: str, init: subprocess.Popen[bytes], folder: Path) -> None:
        self.name, self.address, self._init, self.folder = name, address, init, folder
        self._commands: list[Command] = []

    @property
    def pid(self) -> int:
        """Of its first process."""
        return _children(self._init.pid)[0]

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> Command:
        """Start a program there."""
        output = self.folder / f"output-{len(self._commands)}"
        environ = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder),
            **(env or {}),
        }
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["nsenter", "--target", str(self.pid), "--all", "--wd=/", "--", *command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._commands.append(Command(process, output))
        return self._commands[-1]

    def do(self, *command: str) -> None:
        """Run a program there to its end."""
        started = self.start(*command)
        assert started.wait(30) == 0, started.output

    def up(self, *arguments: str, env: Mapping[str, str] | None = None) -> Command:
        """``helmsman up`` there."""
        return self.start(sys.executable, "-m", "helmsman.controller.cli", "up", *arguments, env=env)

    def processes(self) -> dict[int, str]:
        """What runs there, but for its first process: pid as seen from here -> command line."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != self.pid:
                try:
                    if os.readlink(f"/proc/{entry}/ns/pid") == space:
                        found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
        return {pid: line for pid, line in found.items() if line}

    def pid_of(self, program: str) -> int:
        """Of the one process there that runs this program."""
        (pid,) = [pid for pid, line in self.processes().items() if os.path.basename(line.partition(" ")[0]) == program]
        return pid

    def left(self) -> list[str]:
        """What is left there of a run: processes, and files but for logs."""
        files = [str(path) for path in self.folder.glob("hm-*")] + os.listdir(f"/proc/{self.pid}/root/dev/shm")
        return [*self.processes().values(), *files]


class Hosts:
    """A switch, and hosts on it: rank 0 is the first."""

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
        subprocess.run(["nsenter", "--target", str(self._switch.pid), "--net", "ip", *arguments], check=True)

    def _make(self, index: int) -> Host:
        name, address = f"host{index}", f"{_NETWORK}.{index + 1}"
        folder = self._folder / str(index)
        folder.mkdir()
        names = folder / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{_NETWORK}.{other + 1} host{other}\n" for other in range(16)))
        prepare = (
            f"mount -t proc proc /proc && mount -t tmpfs -o {_SHM} tmpfs /dev/shm && mount --bind {names} /etc/hosts && "
            f"hostname {name} && ip link set lo up && exec sleep infinity"
        )
        init = subprocess.Popen(
            ["unshare", "--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child", "sh", "-c", prepare]
        )
        host = Host(name, address, init, folder)
        wait_until(lambda: bool(_children(init.pid)) and _command(host.pid).startswith("sleep"), f"{name} is there")
        self._on_switch("link", "add", f"to{index}", "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        self._on_switch("link", "set", f"to{index}", "master", "br0", "up")
        host.do("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        host.do("ip", "link", "set", "eth0", "up")
        host.do("ip", "route", "add", "default", "via", f"{_NETWORK}.254")
        return host

    def cut(self, index: int) -> None:
        """Pull a host's cable."""
        self._on_switch("link", "set", f"to{index}", "down")

    def close(self) -> None:
        """End them all."""
        for command in [command for host in self.all for command in host._commands]:
            command.end()
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


def up_all(hosts: Hosts, script: Sequence[str], *arguments: str, env: Mapping[str, str] | None = None) -> list[Command]:
    """``helmsman up`` with the same command line on every host, as SkyPilot would start it."""
    count = len(hosts.all)
    addresses = "\n".join(host.address for host in hosts.all)
    return [
        host.up(
            *arguments,
            "--",
            *script,
            env={
                "SKYPILOT_NODE_RANK": str(rank),
                "SKYPILOT_NUM_NODES": str(count),
                "SKYPILOT_NODE_IPS": addresses,
                "HELMSMAN_TOKEN": "a token of this test",
                **(env or {}),
            },
        )
        for rank, host in enumerate(hosts.all)
    ]
