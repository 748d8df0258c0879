"""Engines of the controllers' tests; only CollectiveTrainer imports torch, which is slow."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helmsman.api.engines import InferenceEngine
from helmsman.api.errors import EngineDeadError
from helmsman.api.generation import GenerationRequest, GenerationResult
from tests.contract.engines import hold_interpreter, wait_for_file  # type: ignore[attr-defined]

SAMPLES: list[dict[str, Any]] = [
    {"input_ids": list(range(1, length + 1)), "index": i}
    for i, length in enumerate([3, 9, 1, 4, 7, 2])
]
RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def count_loss(num_samples: int, scale: float = 1.0) -> Any:
    """Loss for RecordingTrainer, which passes only the number of samples."""
    return num_samples * scale


class RecordingTrainer:
    """Train engine that records its calls and returns values that identify it."""

    worker_id: str = ""

    def __init__(self, name: str = "actor") -> None:
        self.name = name
        self.log: list[str] = []
        self.version = 0
        self.environment: dict[str, str] = {}

    def create_process_group(self) -> None:
        self.environment = {name: os.environ.get(name, "") for name in RENDEZVOUS}
        self.log.append("create_process_group")

    def initialize(self) -> None:
        self.log.append("initialize")

    def describe(self) -> tuple[str, list[str], dict[str, str]]:
        """Return name, calls so far and rendezvous variables."""
        return self.name, self.log, self.environment

    def train_batch(
        self, samples: Sequence[Any], loss_fn: Any, loss_kwargs: Mapping[str, Any] | None
    ) -> dict[str, float]:
        """Increment the version, and return statistics of this rank's share."""
        self.log.append("train_batch")
        self.version += 1
        return {
            **self._figures(samples),
            "loss": float(loss_fn(len(samples), **(loss_kwargs or {}))),
        }

    def eval_batch(
        self, samples: Sequence[Any], loss_fn: Any, loss_kwargs: Mapping[str, Any] | None
    ) -> dict[str, float]:
        self.log.append("eval_batch")
        return self._figures(samples)

    def _figures(self, samples: Sequence[Any]) -> dict[str, float]:
        return {
            "num_samples": len(samples),
            "num_tokens": sum(len(sample["input_ids"]) for sample in samples),
        }

    def forward(self, samples: Sequence[Any]) -> list[list[int]]:
        self.log.append("forward")
        return [[-token for token in sample["input_ids"]] for sample in samples]

    def export_weights(self) -> dict[str, list[float]]:
        return {"weight": [float(self.version)]}

    def publish_weights(self, target: Any, form: Any) -> Mapping[str, Any]:
        """Return all weights by name, whatever the target."""
        return self.export_weights()

    def save(self, path: str) -> None:
        self.log.append(f"save {path}")

    def load(self, path: str) -> None:
        self.log.append(f"load {path}")

    def get_version(self) -> int:
        return self.version

    def set_version(self, version: int) -> None:
        self.version = version

    def set_lr(self, lr: float) -> None:
        self.log.append(f"set_lr {lr}")

    def destroy(self) -> None:
        """Nothing to release."""


class CollectiveTrainer(RecordingTrainer):
    """Train engine whose ranks add up their samples over gloo; rank 1 fails on request."""

    def create_process_group(self) -> None:
        """Join by the variables of the environment."""
        import torch.distributed as dist

        dist.init_process_group("gloo")

    def train_batch(
        self, samples: Sequence[Any], loss_fn: Any, loss_kwargs: Mapping[str, Any] | None
    ) -> dict[str, float]:
        """Return the number of samples on all ranks.

        With a ``fault``, rank 1 'dies' or 'leaves' the group with an error, while rank 0 waits.
        """
        import torch
        import torch.distributed as dist

        fault = (loss_kwargs or {}).get("fault")
        if fault and dist.get_rank() == 1:
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            dist.destroy_process_group()
            raise ValueError("loss is nan")
        total = torch.tensor([float(len(samples))])
        dist.all_reduce(total)
        return {"sum": total.item()}


class CountingRollout:
    """Rollout engine whose requests end at once, or by ``finish`` with ``gated=True``."""

    worker_id: str = ""

    def __init__(self, gated: bool = False) -> None:
        self.gated = gated
        self.version = 0
        self.served: list[str] = []
        self.most_at_once = 0
        self.running: dict[str, asyncio.Future[str]] = {}
        self.num_updates = 0
        self.finished = asyncio.Event()
        self.ready = False

    def initialize(self) -> None:
        self.ready = True

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        """Return the prompt's tokens plus one, up to max_new_tokens; refuse the prompt [0]."""
        if request.prompt_ids == [0]:
            raise ValueError("token 0 is no prompt")
        self.served.append(request.request_id)
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.running[request.request_id] = ended
        self.most_at_once = max(self.most_at_once, len(self.running))
        if not self.gated:
            await asyncio.sleep(0)
            if not ended.done():
                ended.set_result("length")
        stop_reason = await ended
        del self.running[request.request_id]
        tokens = [token + 1 for token in request.prompt_ids][: request.sampling.max_new_tokens]
        return GenerationResult(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=[0.0] * len(tokens),
            versions=[self.version] * len(tokens),
            stop_reason="abort" if stop_reason == "abort" else "length",
        )

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        chosen = [id_ for id_ in self.running if request_ids is None or id_ in request_ids]
        for id_ in chosen:
            self.running[id_].set_result("abort")
        return len(chosen)

    async def finish(self, num: int | None = None) -> list[str]:
        """End the oldest ``num`` requests (None: all)."""
        self.finished.set()
        chosen = [id_ for id_, ended in self.running.items() if not ended.done()][:num]
        for id_ in chosen:
            self.running[id_].set_result("length")
        return chosen

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> int:
        """Accept weights with the key 'weight'; 'stuck' ones are ignored, 'held' ones wait."""
        self.num_updates += 1
        if "weight" not in weights:
            raise KeyError("weight")
        if weights["weight"] == "stuck":
            return self.version
        if weights["weight"] == "held":
            await self.finished.wait()
        self.version = version
        return version

    def get_version(self) -> int:
        return self.version

    async def figures(self) -> tuple[int, int, list[str]]:
        """Return the number of updates, the most requests at once, and all requests in order."""
        return self.num_updates, self.most_at_once, self.served

    def hold_interpreter(self, started: str) -> None:
        hold_interpreter(started)

    def spin(self, seconds: float) -> None:
        """Keep the engine thread busy, and the interpreter with it."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    def wait(self, started: str, release: str) -> None:
        """Create the file ``started``, and block the engine thread until ``release`` exists."""
        Path(started).touch()
        wait_for_file(release)

    async def die(self) -> None:
        """Kill this process."""
        os.kill(os.getpid(), signal.SIGKILL)

    def destroy(self) -> None:
        """Nothing to release."""


class RolloutOfAChild(CountingRollout, InferenceEngine):  # type: ignore[misc]
    """CountingRollout that depends on a child process."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__(gated)
        self.child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])

    def failure(self) -> str | None:
        return (
            None if self.child.poll() is None else f"its process ended with {self.child.returncode}"
        )

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        answer = asyncio.ensure_future(super().agenerate(request))
        while not answer.done():
            try:
                self._require_child()
            except EngineDeadError:
                answer.cancel()
                raise
            await asyncio.wait([answer], timeout=0.01)
        return answer.result()

    def _require_child(self) -> None:
        if (reason := self.failure()) is not None:
            raise EngineDeadError(engine=type(self).__name__, reason=reason)

    async def sleep(self, level: int = 1) -> None:
        self._require_child()

    async def wake(self, *, weights_only: bool = False) -> None:
        self._require_child()

    async def child_pid(self) -> int:
        return self.child.pid

    def destroy(self) -> None:
        self.child.kill()
        self.child.wait()


class SleepyRollout(CountingRollout):
    """CountingRollout whose sleep does not complete while the file ``hold`` exists."""

    def __init__(self, hold: str, gated: bool = False) -> None:
        super().__init__(gated)
        self.hold, self.state = Path(hold), "awake"

    async def sleep(self, level: int = 1) -> None:
        self.state = "drowsy"
        while self.hold.exists():  # noqa: ASYNC110 - another process removes it
            await asyncio.sleep(0.01)
        self.state = "asleep"

    async def wake(self, *, weights_only: bool = False) -> None:
        self.state = "warm" if weights_only else "awake"

    async def how_awake(self) -> str:
        return self.state


class CountingRolloutThatStops(CountingRollout):
    """Stops its process in the constructor if the file exists, and removes the file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        if os.path.exists(path):
            os.remove(path)
            # To this thread: another one may handle the signal late.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


class SlowRollout(CountingRollout):
    """CountingRollout whose start waits for a gate, or fails, while the file ``hold`` exists."""

    def __init__(self, hold: str, started: str, release: str, gated: bool = False) -> None:
        super().__init__(gated)
        if os.path.exists(hold):
            if Path(hold).read_text() == "refuse":
                raise ValueError("it was told to refuse")
            self.wait(started, release)
