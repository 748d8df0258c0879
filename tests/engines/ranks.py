"""Run a function on several gloo ranks, each in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.pool import Pool
from typing import Any

import torch

from tests.engines.preload import PRELOAD

TIMEOUT_S = 300.0

_pools: list[Pool] = []
"""Of one process each, by rank: torch remembers by a mesh where in it this process is."""


def free_port() -> int:
    """A free port of this machine; the kernel gives none of these to
    others by itself.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def processes() -> ForkServerContext:
    """Makes new processes, which have what engines import: to import it in each takes longer than
    most of these tests.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What ``function(*args)`` returns on each rank, with torch's variables set as a scheduler sets
    them.

    The processes stay for other functions, but those of a function that failed.
    """
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
    }
    while len(_pools) < world_size:
        _pools.append(processes().Pool(1))
    pending = [
        pool.apply_async(
            _with_environment,
            (function, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, args),
        )
        for rank, pool in enumerate(_pools[:world_size])
    ]
    try:
        return [result.get(TIMEOUT_S) for result in pending]
    except BaseException:
        end_ranks()
        raise


def end_ranks() -> None:
    """End the processes, and the one that they are forked from."""
    while _pools:
        pool = _pools.pop()
        pool.terminate()
        pool.join()
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _with_environment(
    function: Callable[..., Any], environment: dict[str, str], args: tuple[Any, ...]
) -> Any:
    os.environ.update(environment, HELMSMAN_PLATFORM="cpu")
    torch.set_num_threads(1)
    return function(*args)
