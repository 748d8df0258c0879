"""Run a function on several gloo ranks, each in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
from collections.abc import Callable
from multiprocessing.pool import Pool
from typing import Any

import torch

TIMEOUT_S = 300.0

_pools: list[Pool] = []
"""Of one process each, by rank: torch remembers by a mesh where in it this process is."""


def free_port() -> int:
    """A port of this machine that nobody listens on right now; the kernel gives none of these to others by itself."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What ``function(*args)`` returns on each rank, with torch's variables set as a scheduler sets them.

    The processes stay for other functions, since to import torch takes longer than most of these. Those of a function that
    failed are not used again.
    """
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    while len(_pools) < world_size:
        _pools.append(multiprocessing.get_context("spawn").Pool(1))
    pending = [
        pool.apply_async(_with_environment, (function, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, args))
        for rank, pool in enumerate(_pools[:world_size])
    ]
    try:
        return [result.get(TIMEOUT_S) for result in pending]
    except BaseException:
        end_ranks()
        raise


def end_ranks() -> None:
    """End the processes."""
    while _pools:
        pool = _pools.pop()
        pool.terminate()
        pool.join()


def _with_environment(function: Callable[..., Any], environment: dict[str, str], args: tuple[Any, ...]) -> Any:
    os.environ.update(environment, HELMSMAN_PLATFORM="cpu")
    torch.set_num_threads(1)
    return function(*args)
