"""Engines of little servers, for tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from helmsman.api.worker_context import WorkerContext, within
from helmsman.engines.server_engine import ServerEngine
from helmsman.rpc_server.ports import PortLeases
from tests.engines import little_server

DIALECTS = ["vllm", "sglang"]
PROGRAM = Path(little_server.__file__)


def write_model(folder: Path, weight: float, name: str = "layer.weight") -> str:
    """A model whose weight is this; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.full((4,), weight)}, folder / "model.safetensors")
    (folder / "config.json").write_text(f'{{"vocab_size": {little_server.VOCAB}}}')
    index = f'{{"metadata": {{"total_size": 16}}, "weight_map": {{"{name}": "model.safetensors"}}}}'
    (folder / "model.safetensors.index.json").write_text(index)
    return str(folder)


def fields(dialect: str, model: str, *args: str, mode: str = "serve", **others: Any) -> dict[str, Any]:
    """Of a ServerConfig."""
    return {
        "dialect": dialect,
        "model": model,
        "command": (sys.executable, str(PROGRAM), dialect, mode),
        "args": args,
        "start_timeout_s": 60.0,
        "stop_timeout_s": 5.0,
        **others,
    }


@contextmanager
def engine_of(dialect: str, model: str, *args: str, **others: Any) -> Iterator[ServerEngine]:
    """An engine with a port of its own, which is not initialised."""
    leases = PortLeases()
    ports = tuple(leases.lease(1))
    try:
        with within(WorkerContext(worker_id="rollout/0", node="127.0.0.1", ports=ports)):
            engine = ServerEngine(**fields(dialect, model, *args, **others))
        try:
            yield engine
        finally:
            engine.destroy()
    finally:
        leases.close()


def continuation(prompt: list[int], count: int, weight: float) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of the little server's model."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(little_server.next_token(tokens, weight))
    made = tokens[len(prompt) :]
    return made, [little_server.logprob_of(token, weight) for token in made]
