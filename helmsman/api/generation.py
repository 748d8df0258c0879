"""Sampling parameters, generation requests and results, which driver and workers exchange.

This module does not import torch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from helmsman.api.suggestions import Suggesting

StopReason = Literal["stop", "length", "abort"]
InFlight = Literal["keep", "wait", "abort"]
"""Handling of running requests when no more may start; see RolloutController.pause."""


class SamplingParams(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """Settings for drawing the next token, with the meaning of those of vLLM and Hugging Face."""

    max_new_tokens: int = 128
    """Maximum number of tokens to generate, stop token included."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy decoding."""
    top_k: int = 0
    """Keep only the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p (nucleus sampling,
    arXiv:1904.09751); 1 keeps all.
    """
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the sequence; the result includes the stop token."""
    seed: int | None = None
    """Seed of this request alone, which makes its tokens independent of the batch; None draws one.
    """

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; expected at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; expected 0 (greedy) or more")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; expected 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected more than 0 and at most 1")


class GenerationRequest(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """One sequence to continue."""

    request_id: str
    """Unique among the requests in flight; identifies the request in ``abort``."""
    prompt_ids: list[int]
    """Token ids of the prompt, at least one."""
    sampling: SamplingParams = SamplingParams()
    num_generated: int = 0
    """Number of tokens at the end of ``prompt_ids`` that an earlier attempt generated. An engine
    that numbers its random draws by generated token continues from this number, so that a seed
    gives the same tokens as an uninterrupted run. ``max_new_tokens`` does not count these tokens.
    """

    def __post_init__(self) -> None:
        if not 0 <= self.num_generated <= len(self.prompt_ids):
            raise ValueError(
                f"request {self.request_id!r}: num_generated is {self.num_generated}; expected 0 "
                f"to {len(self.prompt_ids)}, "
                "since those tokens are the last of prompt_ids"
            )


class GenerationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The continuation of one prompt."""

    request_id: str
    token_ids: list[int]
    """Generated tokens without the prompt; ends with the stop token if stop_reason is 'stop'."""
    logprobs: list[float]
    """Natural log-probability of each generated token under the model at temperature 1, without
    top-k or top-p.
    """
    versions: list[int]
    """Weight version that produced each token."""
    stop_reason: StopReason
