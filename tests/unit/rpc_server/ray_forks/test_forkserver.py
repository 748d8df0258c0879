"""Tests that only requests for plain Python workers are read, and commands of raylets changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helmsman.rpc_server._ray_forks import client as ray_fork_client
from helmsman.rpc_server._ray_forks import ray_patches
from helmsman.rpc_server._ray_forks.client import request
from helmsman.rpc_server._ray_forks.forkserver import read_order

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
    "changes",
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
            {"more": ['--serialized-runtime-env-context={"unheard_of": 1}']}, id="an unknown field"
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
def test_read_order_other_workers(changes: dict[str, Any]) -> None:
    assert _read(*changes.pop("more", ()), **changes) is None


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
