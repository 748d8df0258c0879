"""Run a function on several gloo ranks, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import torch

TIMEOUT_S = 300.0


def free_port() -> int:
    """A port of this machine that nobody listens on right now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What ``function(*args)`` returns on each rank, with torch's variables set as a scheduler sets them."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    context = multiprocessing.get_context("spawn")
    with context.Pool(world_size) as pool:
        pending = [
            pool.apply_async(_with_environment, (function, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, args))
            for rank in range(world_size)
        ]
        return [result.get(TIMEOUT_S) for result in pending]


def _with_environment(function: Callable[..., Any], environment: dict[str, str], args: tuple[Any, ...]) -> Any:
    os.environ.update(environment, HELMSMAN_PLATFORM="cpu")
    torch.set_num_threads(1)
    return function(*args)
