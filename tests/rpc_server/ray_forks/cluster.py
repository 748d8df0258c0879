"""An embedded cluster whose workers are forks, and an actor that reports facts of its worker."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from helmsman.controller._scheduler.factory import make_scheduler
from tests.processes import command_of

ray = pytest.importorskip("ray")
pytest.importorskip("torch")

PLAIN = {"runtime_env": {"env_vars": {"TORCH_OF_ITS_OWN": "1"}}}
"""Options of an actor or task whose worker is not forked: the variable could change the import of a
library that the fork server has loaded.
"""

SHELL_VARIABLES = ("_", "PWD", "OLDPWD", "SHLVL")
"""Variables that differ because Ray starts its workers through a shell."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A scheduler with an embedded cluster, whose script ignores SIGHUP as under nohup."""
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
    """The fork server of the cluster."""
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
        return facts_of_process()

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


def facts_of_process() -> dict[str, Any]:
    """Return the facts by which a worker can see how it was started."""
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
