"""Batch and cache sizes from the memory of a device, with their arithmetic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from helmsman.recipes.settings import GRPOSettings, RunSettings

_STATE_BYTES = 16
"""Bytes per parameter in training: float32 weight and gradient, and AdamW's two moments."""
_USABLE = 0.8
"""Fraction of a device's memory available to these sizes; the rest is for fragmentation, the
runtime and collectives."""
_MOST_TOKENS = 65536
_MOST_IN_FLIGHT = 512


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of a model's config.json that sizes depend on."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int = 0
    intermediate_size: int = 0
    head_dim: int | None = None

    @property
    def kv_width(self) -> int:
        """Number of elements of one token's keys, or values, in one layer."""
        head = self.head_dim or self.hidden_size // self.num_attention_heads
        return head * (self.num_key_value_heads or self.num_attention_heads)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of a decoder with gated feed-forward layers, embedding and head."""
        hidden, inner = self.hidden_size, self.intermediate_size or 4 * self.hidden_size
        layer = 2 * hidden * hidden + 2 * hidden * self.kv_width + 3 * hidden * inner
        return self.num_hidden_layers * layer + 2 * self.vocab_size * hidden


def read_shape(model: str) -> ModelShape | None:
    """Return the shape of the model in a folder, or None without a suitable config.json."""
    try:
        return msgspec.json.decode((Path(model) / "config.json").read_bytes(), type=ModelShape)
    except (OSError, msgspec.DecodeError):
        return None


def sizes(settings: RunSettings) -> list[tuple[str, Any, str]]:
    """Return (key, value, arithmetic) of the derived sizes.

    The list is empty if the model's shape or the memory is unknown.
    """
    shape = read_shape(settings.model)
    if shape is None:
        return []
    cluster = settings.cluster
    if cluster.devices_per_node:
        memory, source, width = cluster.device_memory_gb * 1e9, "a device", 2
    else:
        workers = cluster.train_workers + (
            cluster.rollout_instances if isinstance(settings, GRPOSettings) else 0
        )
        memory, source, width = (
            host_memory_bytes() / max(1, workers),
            "the host, for each worker",
            4,
        )
    if not memory:
        return []
    found = [_tokens(settings, shape, memory, source, width)]
    if isinstance(settings, GRPOSettings):
        found.append(_in_flight(settings, shape, memory, source, width))
    return found


def _tokens(
    settings: RunSettings, shape: ModelShape, memory: float, source: str, width: int
) -> tuple[str, Any, str]:
    """Derive tokens per micro-batch: memory left by the state, over activations per token."""
    ranks = settings.cluster.train_workers
    state = _STATE_BYTES * shape.num_parameters / ranks
    inner = shape.intermediate_size or 4 * shape.hidden_size
    kept = (
        2 * shape.hidden_size
        if settings.train.engine.get("gradient_checkpointing")
        else 12 * shape.hidden_size + 3 * inner
    )
    per_token = width * shape.num_hidden_layers * kept + 8 * shape.vocab_size
    left = _USABLE * memory - state
    longest = settings.data.max_tokens
    if isinstance(settings, GRPOSettings):
        longest = settings.max_model_len
    tokens = _power_of_two(left / per_token) if left > 0 else 1
    tokens = max(longest, min(_MOST_TOKENS, tokens))
    reason = (
        f"({_USABLE:g} x {_gb(memory)} of {source} - {_gb(state)} of state) / {_kb(per_token)} of "
        f"a token, rounded down to a "
        f"power of two, from {longest}, the longest sequence, to {_MOST_TOKENS}"
    )
    return "train.engine.max_tokens_per_micro_batch", tokens, reason


def _in_flight(
    settings: GRPOSettings, shape: ModelShape, memory: float, source: str, width: int
) -> tuple[str, Any, str]:
    """Derive requests in flight per instance: those of a step, limited by the KV cache."""
    cluster = settings.cluster
    weights = width * shape.num_parameters / max(1, cluster.rollout_devices)
    sequence = (
        2
        * width
        * shape.num_hidden_layers
        * shape.kv_width
        * settings.max_model_len
        / max(1, cluster.rollout_devices)
    )
    fitting = int((_USABLE * memory - weights) / sequence)
    requests = settings.prompts_per_step * settings.samples_per_prompt * settings.rollout.oversample
    asked = math.ceil(requests / cluster.rollout_instances)
    value = max(1, min(asked, fitting, _MOST_IN_FLIGHT))
    reason = (
        f"the least of {asked} requests of a step, {fitting} = ({_USABLE:g} x {_gb(memory)} of "
        f"{source} - {_gb(weights)} of "
        f"weights) / {_kb(sequence)} of cache for {settings.max_model_len} tokens, and "
        f"{_MOST_IN_FLIGHT}"
    )
    return "rollout.max_in_flight", value, reason


def host_memory_bytes() -> int:
    """Return the available memory of this machine in bytes, or 0 if unknown."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(fields.get("MemAvailable", "0 kB").split()[0]) * 1024


def _power_of_two(value: float) -> int:
    return 1 << max(0, math.floor(math.log2(value))) if value >= 1 else 1


def _gb(value: float) -> str:
    return f"{value / 1e9:.3g} GB"


def _kb(value: float) -> str:
    return f"{value / 1e3:.3g} kB"
