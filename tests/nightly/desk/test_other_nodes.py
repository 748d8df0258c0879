"""Test that recordings and logs are fetched from a host with its own file system."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import program
from tests.cluster.hosts import Command, Host, Hosts, why_not_here
from tests.contract.helpers import wait_until

pytestmark = [
    pytest.mark.skipif(bool(why_not_here()), reason=why_not_here()),
    pytest.mark.timeout(300),
]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    found = Hosts(2)
    yield found
    found.close()


def up(hosts: Hosts, rank: int, log_dir: Path) -> Command:
    environ = {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "host0 host1",
        "HELMSMAN_TOKEN": "a token of this test",
    }
    command = (sys.executable, str(program.__file__), "records", str(log_dir))
    return hosts[rank].up("--timeout=90", "--", *command, env=environ)


def helmsman(hosts: Hosts, *arguments: str) -> str:
    """Run a command on the host of the script, and return its output."""
    command = hosts[0].start(sys.executable, "-m", "helmsman._cli", *arguments)
    command.ends(0, limit_s=60.0)
    return command.output


def pid_of_worker(host: Host, worker_id: str) -> int:
    """Wait for the title of a worker, which its process sets at its start."""
    pids: list[int] = []

    def is_seen() -> bool:
        processes = host.processes().items()
        pids[:] = [pid for pid, line in processes if line.startswith(f"helmsman: {worker_id} ")]
        return bool(pids)

    wait_until(is_seen, f"{worker_id} has its title")
    (pid,) = pids
    return pid


def test_files_of_another_node_are_fetched(hosts: Hosts) -> None:
    log_dir, out = hosts[0].folder / "logs", hosts[0].folder / "trace"
    log_dir.mkdir(mode=0o700)
    hosts[1].do("mount", "-t", "tmpfs", "tmpfs", str(log_dir))
    head = up(hosts, 0, log_dir)
    up(hosts, 1, log_dir)
    head.said("2 workers were called")
    assert not list(log_dir.glob("actor-*"))
    # Another worker of the node reads the files of a stopped worker.
    stopped = pid_of_worker(hosts[1], "actor/0")
    os.kill(stopped, signal.SIGSTOP)
    assert "recordings of" not in helmsman(hosts, "trace", str(log_dir), "-o", str(out))
    events = json.loads(out.read_bytes())["traceEvents"]
    ran = {each["id"].split()[0] for each in events if each["ph"] == "f"}
    assert ran == {"actor/0", "actor/1"}
    assert {each.stat().st_mode & 0o777 for each in (log_dir / "fetched").iterdir()} == {0o600}
    logs = helmsman(hosts, "logs", str(log_dir), "actor")
    assert "[actor/0] " in logs
    assert "[actor/1] " in logs
    assert "recordings of" not in logs
    helmsman(hosts, "report", str(log_dir), "-o", str(out))
    assert "engine actor/1 is created" in out.read_text()
    os.kill(stopped, signal.SIGCONT)
    hosts.cut(1)
    text = helmsman(hosts, "trace", str(log_dir), "-o", str(out))
    assert "with older recordings of actor/0-1, which are on node 10.77.0.2" in text
    assert f"scp '10.77.0.2:{log_dir}/" in text
