"""Run a function on several gloo ranks, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.pool import Pool
from typing import Any

import torch

TIMEOUT_S = 300.0

_pools: list[tuple[int, Pool]] = []
"""One at most, and its processes."""


def free_port() -> int:
    """A port of this machine that nobody listens on right now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What ``function(*args)`` returns on each rank, with torch's variables set as a scheduler sets them.

    The processes stay for other functions, since to import torch takes longer than most of these. Those of a function that
    failed are not used again.
    """
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    pool = _pool_of(world_size)
    pending = [
        pool.apply_async(_with_environment, (function, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, args))
        for rank in range(world_size)
    ]
    try:
        return [result.get(TIMEOUT_S) for result in pending]
    except BaseException:
        end_ranks()
        raise


def _pool_of(size: int) -> Pool:
    if not _pools or _pools[0][0] < size:
        end_ranks()
        _pools.append((size, multiprocessing.get_context("spawn").Pool(size)))
    return _pools[0][1]


def end_ranks() -> None:
    """End the processes."""
    while _pools:
        _, pool = _pools.pop()
        pool.terminate()
        pool.join()


def _with_environment(function: Callable[..., Any], environment: dict[str, str], args: tuple[Any, ...]) -> Any:
    os.environ.update(environment, HELMSMAN_PLATFORM="cpu")
    torch.set_num_threads(1)
    return function(*args)
