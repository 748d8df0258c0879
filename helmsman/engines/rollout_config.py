"""Configuration of the rollout engine."""

from __future__ import annotations

from typing import Any

import msgspec

from helmsman.api.suggestions import Suggesting


class RolloutConfig(
    msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Configuration of a rollout engine: its model and its limits."""

    model: str | dict[str, Any]
    """Local folder in the Hugging Face layout, or the entries of a configuration, including
    ``model_type``.
    """
    max_concurrency: int = 64
    """Sequences that are decoded together; further requests wait. The cache is allocated for all of
    them at full length.
    """
    max_model_len: int = 2048
    """Maximum tokens of a sequence, prompt and continuation; a longer continuation ends with
    stop_reason 'length'. The model's own maximum number of positions also applies.
    """
    max_prefill_tokens: int = 16384
    """Most prompt tokens, padding included, that are computed between two decoding steps; a longer
    prompt is computed alone.
    """
    dtype: str = "auto"
    """Type of weights and cache, such as ``bfloat16``; ``auto`` is bfloat16 on devices, float32 on
    the host.
    """
    seed: int = 0
    """Seed of randomly initialised weights; use the training engine's seed to start from its
    weights.
    """
    close_timeout_s: float = 60.0
    """Seconds that destroy waits for the running step."""

    def __post_init__(self) -> None:
        if self.max_concurrency < 1 or self.max_model_len < 2:
            raise ValueError(
                f"max_concurrency is {self.max_concurrency} and max_model_len is "
                f"{self.max_model_len}; expected at least 1 and at least 2"
            )
