"""Run a function on several gloo ranks, each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests import zygote
from tests.engines.preload import PRELOAD

TIMEOUT_S = 110.0


def free_port() -> int:
    """Return a free port of this machine, from a range that the kernel does not assign itself."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Return the results of ``function(*args)`` on each rank, with torch's variables set as a
    scheduler sets them.
    """
    codes, outputs, results = exits_of_ranks(function, world_size, *args)
    failed = [f"rank {rank}: {outputs[rank]}" for rank, code in enumerate(codes) if code]
    assert not failed, "\n".join(failed)
    return [pickle.loads(each) for each in results]


def exits_of_ranks(
    function: Callable[..., Any], world_size: int, *args: Any
) -> tuple[list[int], list[str], list[bytes]]:
    """Run a function as run_ranks does; return the exit code, the output and the pickled result of
    each rank.
    """
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "HELMSMAN_PLATFORM": "cpu",
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        (Path(folder) / "call").write_bytes(pickle.dumps((function, args)))
        files, programs = [], []
        for rank in map(str, range(world_size)):
            files.append(stack.enter_context(Path(folder, f"output-{rank}").open("w+")))
            programs.append(
                zygote.start(
                    [sys.executable, "-m", __name__, folder, rank],
                    env={**environment, "RANK": rank, "LOCAL_RANK": rank},
                    stdout=files[-1],
                    preload=("pytest", *PRELOAD),
                )
            )
            stack.callback(programs[-1].kill)
        codes = [program.wait(TIMEOUT_S) for program in programs]
        paths = [Path(folder, f"result-{rank}") for rank in range(world_size)]
        return (
            codes,
            [Path(file.name).read_text() for file in files],
            [path.read_bytes() if path.exists() else b"" for path in paths],
        )


def _main(folder: Path, rank: str) -> None:
    torch.set_num_threads(1)
    function, args = pickle.loads((folder / "call").read_bytes())
    (folder / f"result-{rank}").write_bytes(pickle.dumps(function(*args)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
