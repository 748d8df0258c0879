"""Build engines whose server is the one of little_server.py, and its models."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helmsman._process.ports import PortLeases
from helmsman.api.workers import WorkerContext, within
from helmsman.engines._server.weights import write_folder
from helmsman.engines.server_engine import ServerEngine
from tests.engines import little_server

DIALECTS = ["vllm", "sglang"]
PROGRAM = Path(little_server.__file__)


CONFIG = {
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": little_server.VOCAB,
    "tie_word_embeddings": False,
}


@functools.cache
def _shapes() -> dict[str, list[int]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


def tensors_of(weight: float) -> dict[str, torch.Tensor]:
    """Return the tensors of a model with this weight."""
    return {name: torch.full(shape, weight) for name, shape in _shapes().items()}


def adapter_of(weight: float, rank: int = 2) -> dict[str, torch.Tensor]:
    """Return an adapter with this weight, as a trainer sends it."""
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    return {
        f"{layer}.lora_A.weight": torch.full((rank, 4), weight),
        f"{layer}.lora_B.weight": torch.full((4, rank), weight),
    }


def write_model(folder: Path, weight: float) -> str:
    """Write a model with this weight to a folder; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_folder([tensors_of(weight)], str(folder))
    return str(folder)


def fields(
    dialect: str, model: str, *args: str, mode: str = "serve", **others: Any
) -> dict[str, Any]:
    """Return the fields of a ServerConfig."""
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
    """Build an engine with a leased port, which is not initialised."""
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
    """Return the tokens and log-probabilities of the little server's model."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(little_server.next_token(tokens, weight))
    made = tokens[len(prompt) :]
    return made, [little_server.logprob_of(token, weight) for token in made]
