"""Reward functions of the contract tests, found in the workers by import path."""

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
    """Do as the item says; a number is doubled."""
    match item:
        case "pid":
            return os.getpid()
        case "fail":
            raise ValueError(f"no score for {details}")
        case "wait":
            started, release = details
            Path(started).touch()
            wait_for_file(release)  # the line that a time-out shows
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


_inside = 0


async def aact(item: Any, *details: Any) -> Any:
    """As act, awaited; 'together' waits until so many of them have come."""
    global _inside
    match item:
        case "together":
            _inside += 1
            deadline = time.monotonic() + WAIT_LIMIT_S
            # The others make it true
            while _inside < details[0] and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            return threading.current_thread().name
        case "for ever":
            await asyncio.Event().wait()
        case "exit":
            await asyncio.gather(asyncio.sleep(0), aact("exit by itself"))  # a task of its own
        case "block":
            wait_for_file(details[0])
    return act(item, *details)


class Scorer:
    """An object that is called, and awaited."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    async def __call__(self, item: int, plus: int = 0) -> int:
        """Multiply."""
        return self.factor * item + plus


UNCALLABLE = 3
