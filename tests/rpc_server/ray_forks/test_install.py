"""On an embedded cluster Ray's Python workers are forks, whatever runs in them, and are like those
that Ray starts itself.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._schedulers.factory import make_scheduler
from helmsman.rpc_server._process.guardian import wait_until
from helmsman.rpc_server._ray_forks import client as ray_fork_client
from helmsman.rpc_server._ray_forks.client import GREETING, request
from helmsman.rpc_server._ray_forks.forkserver import read_order
from tests.processes import command_of

ray = pytest.importorskip("ray")
pytest.importorskip("torch")

# Imports of Ray come after the check for it
from helmsman.rpc_server._ray_forks import ray_patches  # noqa: E402

pytestmark = pytest.mark.slow

PLAIN = {"runtime_env": {"env_vars": {"TORCH_OF_ITS_OWN": "1"}}}
"""Options of an actor or task whose worker is not forked: a library that is loaded already may have
wanted this variable.
"""

OF_A_SHELL = ("_", "PWD", "OLDPWD", "SHLVL")
"""Variables that differ since Ray starts its workers through a shell."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A scheduler with an embedded cluster, of a script that ignores SIGHUP, as nohup has it."""
    disposition = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with make_scheduler(
        "ray",
        address="local",
        num_cpus=32,
        log_dir=tmp_path_factory.mktemp("logs"),
        preload=["torch", "tests.rpc_server.ray_forks.actors"],
    ) as scheduler:
        signal.signal(signal.SIGHUP, disposition)
        yield scheduler


@pytest.fixture(scope="module")
def forkserver(cluster: Any) -> psutil.Process:
    """The parent of its workers."""
    found = [
        child
        for child in psutil.Process().children()
        if "_ray_forks.forkserver" in command_of(child)
    ]
    assert len(found) == 1
    return found[0]


@ray.remote(num_cpus=1)
class Actor:
    def facts(self) -> dict[str, Any]:
        return _facts()

    def random_numbers(self) -> list[float]:
        import random

        import numpy as np

        return [random.random(), float(np.random.random())]

    def random_id(self) -> str:
        return str(ray.WorkerID.from_random().hex())

    def num_threads(self) -> list[int]:
        import torch

        torch.ones(8).sum()
        return [int(os.environ["OMP_NUM_THREADS"]), torch.get_num_threads()]

    def multiply(self) -> float:
        import numpy as np
        import torch

        return float(
            torch.from_numpy(np.ones((300, 300)))
            .matmul(torch.ones(300, 300, dtype=torch.float64))
            .sum()
        )

    def end(self, how: str) -> None:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    def pid(self) -> int:
        return os.getpid()


def _facts() -> dict[str, Any]:
    """What a worker can see of how it was started."""
    status = Path("/proc/self/status").read_text().splitlines()
    main = sys.modules["__main__"]
    return {
        "parent": os.getppid(),
        "argv": [
            each
            for each in sys.argv
            if not each.startswith(("--worker-id=", "--worker-launch-time-ms=", "--runtime-env"))
        ],
        "path": sys.path,
        "folder": os.getcwd(),
        "main": main.__file__,
        "leads its group": os.getpgid(0) == os.getpid(),
        "session": os.getsid(0),
        "nice": os.nice(0),
        "memory killer": Path("/proc/self/oom_score_adj").read_text(),
        "signals": [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
        "limits": [
            resource.getrlimit(kind)
            for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_AS)
        ],
        "variables": dict(os.environ),
        "standard streams": [
            os.readlink(f"/proc/self/fd/{fd}").rpartition(".")[2] for fd in range(3)
        ],
    }


def test_fork_equals_plain_worker(cluster: Any, forkserver: psutil.Process) -> None:
    forked, plain = Actor.remote(), Actor.options(**PLAIN).remote()  # type: ignore[attr-defined]
    of_fork, of_plain = ray.get([forked.facts.remote(), plain.facts.remote()])
    assert of_fork.pop("parent") == forkserver.pid
    assert psutil.Process(of_plain.pop("parent")).name() == "raylet"
    for name in ("TORCH_OF_ITS_OWN", "RAY_JOB_ID", *OF_A_SHELL):  # some are started for any job
        of_fork["variables"].pop(name, None)
        of_plain["variables"].pop(name, None)
    assert of_fork == of_plain


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
    assert wait_until(lambda: not psutil.pid_exists(pid), 5.0), "it is taken from the process table"
    assert forkserver.is_running()


def test_fork_ends_with_its_client(cluster: Any) -> None:
    """The raylet kills it when a worker does not register in time."""
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
    """The last test of this cluster."""
    cluster.create_workers(Job(role="before", tasks=[SchedulingSpec(cpu=1)]))
    forkserver.kill()
    forkserver.wait(5.0)
    facts = ray.get(Actor.options(runtime_env={"env_vars": {"AFTER": "1"}}).remote().facts.remote())  # type: ignore[attr-defined]
    assert psutil.Process(facts["parent"]).name() == "raylet"
    assert cluster.get_workers("before"), "those that it had forked go on"


# --- what is asked for, as far as no cluster is needed --------------------------------------------

ENVIRONMENT = {"PATH": "/bin", "RAY_RAYLET_PID": "7"}
ARGUMENTS = ["/ray/setup_worker.py", "/ray/default_worker.py", "--node-id=1", "--language=PYTHON"]


def _read(*more: str, arguments: list[str] = ARGUMENTS, **environment: str) -> Any:
    variables = {
        os.fsencode(name): os.fsencode(value) for name, value in (ENVIRONMENT | environment).items()
    }
    message = request(b"key", "/folder", [*arguments, *more], variables)
    return read_order(message.removeprefix(b"key\0"), 5, [10, 11, 12], ENVIRONMENT)


def test_read_order_plain_worker() -> None:
    order = _read(
        '--serialized-runtime-env-context={"env_vars": {"A": "b"}, "command_prefix": []}',
        "-x\n=é",
        MY="a\nb=c",
    )
    assert (order.client, order.folder, order.script, order.descriptors) == (
        5,
        "/folder",
        "/ray/default_worker.py",
        [10, 11, 12],
    )
    assert order.arguments == ["--node-id=1", "-x\n=é"]
    assert order.environment == ENVIRONMENT | {"MY": "a\nb=c"}
    assert order.runtime_environment == {"A": "b"}


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(
            {"more": ['--serialized-runtime-env-context={"command_prefix": ["cd", "x", "&&"]}']},
            id="a command before it",
        ),
        pytest.param(
            {"more": ['--serialized-runtime-env-context={"py_executable": "/other/python"}']},
            id="another interpreter",
        ),
        pytest.param(
            {"more": ['--serialized-runtime-env-context={"unheard_of": 1}']},
            id="what a later Ray may want",
        ),
        pytest.param(
            {"more": ['--serialized-runtime-env-context={"env_vars": {"PYTHONPATH": "x"}}']},
            id="PYTHONPATH",
        ),
        pytest.param({"more": ["--worker-type=SPILL_WORKER"]}, id="a worker for spilling"),
        pytest.param(
            {"arguments": ["/ray/setup_worker.py", "-S", *ARGUMENTS[1:]]},
            id="a flag of the interpreter",
        ),
        pytest.param(
            {"arguments": ["/ray/setup_worker.py", "/ray/java", "--language=JAVA"]},
            id="another language",
        ),
        pytest.param({"RAY_RAYLET_PID": "8"}, id="another raylet"),
        pytest.param({"LD_PRELOAD": "x.so"}, id="a variable of the loader"),
    ],
)
def test_read_order_other_workers(asked: dict[str, Any]) -> None:
    assert _read(*asked.pop("more", ()), **asked) is None


@pytest.mark.parametrize(
    "option", ["--other=", "--python_worker_command=/usr/bin/env python /x/setup_worker.py "]
)
def test_through_client_unknown_command(option: str) -> None:
    assert ray_patches.through_client(["raylet", option], Path("/x")) is None


def test_through_client_changes_python_command() -> None:
    words = [sys.executable, "/a folder/setup_worker.py", "/a folder/default_worker.py", "--webui="]
    command = [
        "raylet",
        f"--python_worker_command={subprocess.list2cmdline(words)}",
        "--java_worker_command=",
    ]
    changed = ray_patches.through_client(command, Path("/a folder"))
    words[1:1] = ["-I", "-S", ray_fork_client.__file__]
    assert changed == [
        command[0],
        f"--python_worker_command={subprocess.list2cmdline(words)}",
        command[2],
    ]
