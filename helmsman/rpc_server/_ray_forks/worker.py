"""What a fork of the fork server has to become: a Ray worker like one that the raylet has started itself."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

_READ_AT_START = (
    "RAY_",
    "PYTHON",
    "LD_",
    "LC_",
    "LANG",
    "MALLOC_",
    "GLIBC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH",
    "PYTORCH_",
)
"""Beginnings of the names of variables that act when an interpreter starts, or a library is loaded."""
_FOR_EACH_WORKER = {"RAY_JOB_ID", "RAY_LD_PRELOAD_ON_WORKERS", "PYTHONBREAKPOINT"}
"""Those of them that Ray gives to workers, and that a fork can do without: a worker of no job in particular may serve any."""


class Order(NamedTuple):
    """A worker that the raylet wants."""

    client: int
    """Pid of the process that it has started instead."""
    folder: str
    script: str
    """Ray's program for workers."""
    arguments: list[str]
    """For the script."""
    environment: dict[str, str]
    runtime_environment: dict[str, str]
    """Variables of its runtime environment, in which others may be named."""
    descriptors: list[int]
    """To become its standard streams."""


def read_order(request: bytes, client: int, descriptors: list[int], imported_with: Mapping[str, str]) -> Order | None:
    """Understand a request; None when it is for anything but a plain Python worker.

    Args:
        imported_with: the environment under which the modules were imported that the worker will find imported.
    """
    number, folder, *words = map(os.fsdecode, request.split(b"\0"))
    setup, script, *arguments = words[: int(number)]
    environment = dict(word.split("=", 1) for word in words[int(number) :])
    options = {name: value for name, equals, value in (each.partition("=") for each in arguments) if equals}
    runtime = _plain_variables(options.pop("--serialized-runtime-env-context", ""))
    is_plain = (
        runtime is not None
        and Path(setup).name == "setup_worker.py"
        and Path(script).name == "default_worker.py"
        and options.pop("--language", "") == "PYTHON"
        and "--worker-type" not in options
        and _at_start(environment) == _at_start(imported_with)
        and not _at_start(runtime)
    )
    if not is_plain or runtime is None:
        return None
    own = [each for each in arguments if not each.startswith(("--serialized-runtime-env-context=", "--language="))]
    return Order(client, folder, script, own, environment, runtime, descriptors)


def _plain_variables(context: str) -> dict[str, str] | None:
    """The variables of a runtime environment that consists of variables; None for any other."""
    found = json.loads(context or "{}")
    variables = found.pop("env_vars", None) or {}
    if found.pop("py_executable", None) not in (None, "", sys.executable) or any(found.values()):
        return None
    return dict(variables)


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name.startswith(_READ_AT_START) and name not in _FOR_EACH_WORKER
    }


def become_worker(order: Order, program: CodeType, driver_folders: Iterable[str]) -> None:
    """Run Ray's program for workers in this process, a fork in which nothing else runs.

    Args:
        program: the compiled script.
        driver_folders: what ``sys.path`` has for the fork server alone.
    """
    from ray._private import utils

    os.setpgid(0, 0)  # as the raylet does with those that it starts, and what it ends them by
    for number, fd in enumerate(order.descriptors):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(order.folder)
    _take_after(order.client)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order.environment)
    utils.update_envs(order.runtime_environment)
    time.tzset()
    for folder in driver_folders:  # they were added at the end, and Ray may have put one of them in front since
        del sys.path[len(sys.path) - 1 - sys.path[::-1].index(folder)]
    sys.argv[:] = [order.script, *order.arguments]
    if (numbers := sys.modules.get("numpy.random")) is not None:
        numbers.seed()  # Python's own generator seeds itself after a fork; torch's starts from the same number in every process
    main = ModuleType("__main__")
    main.__file__ = order.script
    sys.modules["__main__"] = main
    exec(program, main.__dict__)


def _take_after(client: int) -> None:
    """Adopt what the raylet gave to its child: limits, signal mask, disposition of SIGHUP, and the score of the OOM killer."""
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            kind = getattr(resource, name)
            with contextlib.suppress(OSError, ValueError):  # one that this user may not raise
                resource.setrlimit(kind, resource.prlimit(client, kind))
    status = Path(f"/proc/{client}/status").read_text()
    mask = int(status.partition("SigBlk:")[2].split()[0], 16)
    is_ignored = int(status.partition("SigIgn:")[2].split()[0], 16) >> (signal.SIGHUP - 1) & 1
    signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)  # ignored under nohup
    signal.pthread_sigmask(signal.SIG_SETMASK, [number for number in signal.valid_signals() if mask >> (number - 1) & 1])
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(Path(f"/proc/{client}/oom_score_adj").read_text())
