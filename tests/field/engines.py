"""Engines of the tests of tests/field; imports at the top are light, so that workers start fast."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helmsman.api.generation import GenerationRequest, GenerationResult
from tests.contract.engines import Counter, wait_for_file  # type: ignore[attr-defined]
from tests.controller.engines import CountingRollout, RecordingTrainer


def cut_connections(pid: int) -> None:
    """Shut down the connections that another process has made to this one."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                peer = copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                if copy.getsockname() and struct.unpack("3i", peer)[0] == pid:
                    copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # it is no socket, or no connected one


class Fallible(Counter):
    """An engine whose calls end its process or its connection."""

    def fall(self, how: str, pid: int, started: str, release: str) -> int:
        """Once ``release`` exists, close the connection to the script, or end this process."""
        self.wait(started, release)
        if how != "socket":
            self.die(how)
        cut_connections(pid)
        return os.getpid()

    def modules(self) -> list[str]:
        return sorted(sys.modules)


class Stepper(RecordingTrainer):
    """Train engine that loses its connection, or its process, after a step and before the answer.

    Args:
        steps: File with one line for each step that was made.
    """

    def __init__(self, steps: str) -> None:
        super().__init__()
        self.steps = Path(steps)

    def train_batch(
        self, samples: Sequence[Any], loss_fn: Any, loss_kwargs: Mapping[str, Any] | None
    ) -> dict[str, float]:
        with self.steps.open("a") as file:
            file.write("step\n")
        match (loss_kwargs or {}).get("then"):
            case "die":
                os._exit(3)
            case int(pid):
                cut_connections(pid)
        return {**self._figures(samples), "loss": 0.0}


class Published(RecordingTrainer):
    """Train engine whose weights are an array, and whose ``publish_weights`` may wait for a file.

    Args:
        started: File that is written when the weights are asked for; none when empty.
        release: File for which the weights then wait.
    """

    def __init__(self, started: str = "", release: str = "") -> None:
        super().__init__()
        self.started, self.release = started, release

    def publish_weights(self, *_: Any) -> dict[str, bytes]:
        if self.started:
            Path(self.started).touch()
            wait_for_file(self.release)
        return {"weight": bytes(100)}

    def sleep(self) -> None:
        """Free nothing."""

    def wake(self) -> None:
        """Allocate nothing."""


class Blocking(CountingRollout):
    """Rollout engine whose weight update blocks the engine thread until a file exists."""

    def __init__(self, started: str, release: str) -> None:
        super().__init__()
        self.files = started, release

    def update_weights(  # type: ignore[override]
        self, weights: Mapping[str, Any], version: int
    ) -> int:
        Path(self.files[0]).touch()
        wait_for_file(self.files[1])
        self.version = version
        return version


class Steady(CountingRollout):
    """Rollout engine whose answer is three tokens, one for each turn of its event loop.

    It fails requests and updates that come while it sleeps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = "awake"
        self.aborted: set[str] = set()

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        if self.state != "awake":
            raise RuntimeError(f"a request while it is {self.state}")
        self.served.append(request.request_id)
        self.aborted.discard(request.request_id)
        tokens: list[int] = []
        versions: list[int] = []
        for token in range(request.num_generated + 1, 4):
            await asyncio.sleep(0)
            if request.request_id in self.aborted:
                break
            tokens.append(token)
            versions.append(self.version)
        return GenerationResult(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=[0.0] * len(tokens),
            versions=versions,
            stop_reason="stop" if tokens[-1:] == [3] else "abort",
        )

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        self.aborted.update(request_ids or self.served)
        return len(request_ids or self.served)

    async def sleep(self, level: int = 1) -> None:
        self.state = "asleep"

    async def wake(self, *, weights_only: bool = False) -> None:
        self.state = "warm" if weights_only else "awake"

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> int:
        if self.state == "asleep":
            raise RuntimeError("weights while it is asleep")
        return await super().update_weights(weights, version)


class Exclusive(Steady):
    """Rollout engine that fails weights which come beside a request."""

    def __init__(self) -> None:
        super().__init__()
        self.num_running = 0

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        self.num_running += 1
        try:
            return await super().agenerate(request)
        finally:
            self.num_running -= 1

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> int:
        for _ in range(8):
            if self.num_running:
                raise RuntimeError("weights beside a request")
            await asyncio.sleep(0)
        return await super().update_weights(weights, version)
