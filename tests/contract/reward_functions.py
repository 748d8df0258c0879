"""Reward functions of the contract tests, which workers import by path."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from helmsman.testing.contract_engine import WAIT_LIMIT_S, wait_for_file


def act(item: Any, *details: Any) -> Any:
    """Do what the item names; double a number."""
    match item:
        case "fail":
            raise ValueError(f"no score for {details}")
        case "wait":
            started, release = details
            Path(started).touch()
            wait_for_file(release)  # the line that a timeout error shows
            return "waited"
        case "die":
            os.kill(os.getpid(), 9)
        case "exit" | "exit by itself":
            sys.exit("no more")
        case "note":
            folder, name = details
            Path(folder, f"{name}-{os.getpid()}-{time.monotonic_ns()}").touch()
            return name
    return 2 * item


_num_inside = 0


async def aact(item: Any, *details: Any) -> Any:
    """Do as act does; "together" waits until the given number of calls run concurrently."""
    global _num_inside
    match item:
        case "together":
            _num_inside += 1
            deadline = time.monotonic() + WAIT_LIMIT_S
            # Concurrent calls make it true.
            while _num_inside < details[0] and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            return threading.current_thread().name
        case "for ever":
            await asyncio.Event().wait()
        case "exit":
            await asyncio.gather(asyncio.sleep(0), aact("exit by itself"))  # in another task
        case "block":
            wait_for_file(details[0])
    return act(item, *details)


class Scorer:
    """An object with an async __call__."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    async def __call__(self, item: int, plus: int = 0) -> int:
        return self.factor * item + plus


UNCALLABLE = 3
