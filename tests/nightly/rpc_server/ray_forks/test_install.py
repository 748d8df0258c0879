"""Tests of tasks, environments and ends of forked Ray workers, and of the fork server's end."""

from __future__ import annotations

import os
import socket
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from helmsman._process.guardian import wait_until
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.rpc_server._ray_forks.client import GREETING, request
from tests.processes import command_of
from tests.rpc_server.ray_forks.cluster import Actor, cluster, forkserver, ray

__all__ = ["cluster", "forkserver"]


def test_fork_runs_tasks_and_actors(cluster: Any, forkserver: psutil.Process) -> None:
    @ray.remote
    def parent_and_sum(number: int) -> tuple[int, int]:
        return os.getppid(), number + 1

    @ray.remote(max_retries=0)
    def fail() -> None:
        raise KeyError("no such thing")

    @ray.remote
    class Waiting:
        async def parent(self) -> int:
            return os.getppid()

    assert ray.get(parent_and_sum.remote(1)) == (forkserver.pid, 2)
    assert ray.get(Waiting.remote().parent.remote()) == forkserver.pid  # type: ignore[attr-defined]
    with pytest.raises(KeyError, match="no such thing"):
        ray.get(fail.remote())
    with_variable = Actor.options(runtime_env={"env_vars": {"MINE": "${HOME}/mine"}}).remote()  # type: ignore[attr-defined]
    facts = ray.get(with_variable.facts.remote())
    assert facts["parent"] == forkserver.pid
    assert facts["variables"]["MINE"] == f"{os.environ['HOME']}/mine"
    assert ray.get(Actor.remote().multiply.remote()) == 300.0**3  # type: ignore[attr-defined]


def test_runtime_environment_with_working_dir(cluster: Any, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as package:
        package.writestr("package/only_there.py", "NUMBER = 5\n")

    @ray.remote(runtime_env={"working_dir": f"file://{tmp_path}/package.zip"})
    def number() -> int:
        import only_there  # type: ignore[import-not-found]

        return int(only_there.NUMBER)

    assert ray.get(number.remote()) == 5


def test_forks_random_numbers_differ(cluster: Any) -> None:
    actors = [Actor.remote() for _ in range(3)]  # type: ignore[attr-defined]
    numbers = ray.get([actor.random_numbers.remote() for actor in actors])
    assert len({each for pair in numbers for each in pair}) == 6
    assert len(set(ray.get([actor.random_id.remote() for actor in actors]))) == 3


def test_fork_num_threads_of_libraries(cluster: Any) -> None:
    few, many = Actor.remote(), Actor.options(num_cpus=3).remote()  # type: ignore[attr-defined]
    assert ray.get([few.num_threads.remote(), many.num_threads.remote()]) == [[1, 1], [3, 3]]
    own = Actor.options(runtime_env={"env_vars": {"OMP_NUM_THREADS": "5"}}).remote()  # type: ignore[attr-defined]
    assert ray.get(own.num_threads.remote())[0] == 5


@pytest.mark.parametrize("how", ["exit", "signal"])
def test_fork_end_noticed_by_ray(cluster: Any, forkserver: psutil.Process, how: str) -> None:
    actor = Actor.remote()  # type: ignore[attr-defined]
    pid = ray.get(actor.pid.remote())
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(actor.end.remote(how))
    assert wait_until(lambda: not psutil.pid_exists(pid), 5.0), "the zombie is reaped"
    assert forkserver.is_running()


def test_fork_ends_with_its_client(cluster: Any) -> None:
    """The raylet kills the client of a worker that does not register in time."""
    clients = _clients()
    actor = Actor.options(runtime_env={"env_vars": {"FRESH": "1"}}).remote()  # type: ignore[attr-defined]
    pid = ray.get(actor.pid.remote())
    (client,) = _clients() - clients
    client.kill()
    assert wait_until(lambda: not psutil.pid_exists(pid), 5.0)


def _clients() -> set[psutil.Process]:
    return {
        each
        for each in psutil.Process().children(recursive=True)
        if "_ray_forks/client.py" in command_of(each)
    }


def test_forkserver_wrong_key(cluster: Any, forkserver: psutil.Process) -> None:
    (address,) = {each.laddr for each in forkserver.net_connections("unix") if each.laddr}
    before = len(forkserver.children())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(address.replace("@", "\0", 1))
        assert client.recv(1) == GREETING
        socket.send_fds(
            client,
            [request(b"guessed", "/", ["setup_worker.py", "default_worker.py"], {})],
            [0, 1, 2],
        )
        assert client.recv(1) == b""
    assert len(forkserver.children()) == before


def test_forkserver_killed(cluster: Any, forkserver: psutil.Process) -> None:
    """This test ends the fork server, so it is the last one."""
    cluster.create_workers(Job(role="before", tasks=[SchedulingSpec(cpu=1)]))
    forkserver.kill()
    forkserver.wait(5.0)
    facts = ray.get(Actor.options(runtime_env={"env_vars": {"AFTER": "1"}}).remote().facts.remote())  # type: ignore[attr-defined]
    assert psutil.Process(facts["parent"]).name() == "raylet"
    assert cluster.get_workers("before"), "its forks continue"
