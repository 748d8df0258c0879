"""The rollout engine: any Hugging Face causal language model with a slot cache and continuous
batching.

One process and one device per instance. Requests join and leave the batch between decoding steps;
weights are exchanged between two steps, and each token carries the version that produced it. Keys
and values computed under earlier weights are kept: the log-probabilities of a sequence that an
update has cut are those with which its tokens were drawn, not those of a fresh pass of either
version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from helmsman.api.engines import InferenceEngine
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.platforms import current_platform
from helmsman.api.suggestions import Suggesting
from helmsman.api.weights import Weights
from helmsman.engines._hf.decode_batch import DecodeBatch
from helmsman.engines._hf.decode_loop import DecodeLoop
from helmsman.engines._models.model import build_model, max_positions, resolve_dtype
from helmsman.engines._serving.generation import check_request, check_samples_of_one

logger = logging.getLogger(__name__)


class RolloutConfig(
    msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """What a rollout engine serves, and how much at a time."""

    model: str | dict[str, Any]
    """Local folder in the Hugging Face layout, or the entries of a configuration with
    ``model_type``.
    """
    max_concurrency: int = 64
    """Sequences that are decoded together; more wait. The cache is allocated for all of them at
    full length.
    """
    max_model_len: int = 2048
    """Most tokens of a sequence, prompt and continuation; a longer continuation ends with
    stop_reason 'length'. The positions that the model was built for are a limit, too."""
    max_prefill_tokens: int = 16384
    """Most prompt tokens, padding included, that are computed between two decoding steps; a longer
    prompt goes alone.
    """
    dtype: str = "auto"
    """Type of weights and cache, such as ``bfloat16``; ``auto`` is bfloat16 on devices, float32 on
    the host.
    """
    seed: int = 0
    """Seed of drawn weights; the train engine's, to start from its weights."""
    close_timeout_s: float = 60.0
    """How long destroy waits for the step that is running."""

    def __post_init__(self) -> None:
        if self.max_concurrency < 1 or self.max_model_len < 2:
            raise ValueError("max_concurrency is at least 1 and max_model_len at least 2")


class HFRolloutEngine(InferenceEngine):
    """A rollout instance on one device.

    Args:
        config: The configuration; or give its fields as keyword arguments.

    Raises:
        ValueError: Unknown fields, or values of another type (msgspec.ValidationError).
    """

    def __init__(self, config: RolloutConfig | None = None, **fields: Any) -> None:
        if config is not None and fields:
            raise ValueError(
                f"give either a RolloutConfig or its fields, not both (fields: {', '.join(fields)})"
            )
        self.config = config if config is not None else msgspec.convert(fields, RolloutConfig)
        self._loop: DecodeLoop | None = None
        self._vocab_size = 0
        self._max_len, self._limit = self.config.max_model_len, "max_model_len"
        self._destroyed = False

    def initialize(self) -> None:
        """Build the model on this instance's device and start decoding; the weights are version 0.

        Raises:
            ValueError: The model cannot be built, or has layers that this engine does not decode.
            RuntimeError: The engine is running or was destroyed.
        """
        if self._loop is not None or self._destroyed:
            raise RuntimeError(
                "initialize() was called on a rollout engine that is running or destroyed; make a "
                "new one"
            )
        current_platform.set_device(0)
        device = current_platform.device(0)
        model = build_model(
            self.config.model, seed=self.config.seed, dtype=resolve_dtype(self.config.dtype)
        ).to(device)
        positions = max_positions(model.config)
        if positions is not None and positions < self._max_len:
            logger.warning(
                "max_model_len is %d, and the model has %d positions: sequences end there",
                self._max_len,
                positions,
            )
            self._max_len, self._limit = positions, "max_position_embeddings of the model"
        batch = DecodeBatch(
            model, num_slots=self.config.max_concurrency, max_len=self._max_len, device=device
        )
        self._vocab_size = batch.vocab_size
        self._loop = DecodeLoop(
            model,
            batch,
            max_len=self._max_len,
            max_prefill_tokens=self.config.max_prefill_tokens,
            version=0,
        )

    def _running(self) -> DecodeLoop:
        if self._loop is None:
            raise RuntimeError(
                "the rollout engine is not running; call initialize() first, and nothing after "
                "destroy()"
            )
        return self._loop

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        """See InferenceEngine. Raises also what the decoding step raised that this request was part
        of.
        """
        return (await self.agenerate_samples([request]))[0]

    async def agenerate_samples(
        self, requests: Sequence[GenerationRequest]
    ) -> list[GenerationResult]:
        """See InferenceEngine. Samples join the batch together, as soon as there are slots for all
        of them (for ``max_concurrency`` of them, where they are more).
        """
        loop = self._running()
        for request in requests:
            check_request(
                request, max_model_len=self._max_len, vocab_size=self._vocab_size, limit=self._limit
            )
        check_samples_of_one(requests)
        # Cancelling the awaiting task cancels the futures, and the loop drops the requests after
        # its step.
        return list(await asyncio.gather(*map(asyncio.wrap_future, loop.submit(requests))))

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        return await asyncio.wrap_future(self._running().abort(request_ids))

    async def update_weights(self, weights: Weights, version: int) -> int:
        """See InferenceEngine. Nothing is decoded while the weights come."""
        return await asyncio.wrap_future(self._running().update_weights(weights, version))

    async def sleep(self, level: int = 1) -> None:
        """See InferenceEngine. Idempotent; level 2 after level 1 drops the weights on the host."""
        await asyncio.wrap_future(self._running().sleep(level))

    async def wake(self, *, weights_only: bool = False) -> None:
        """See InferenceEngine. Idempotent. Raises torch.OutOfMemoryError where there is no room;
        the engine sleeps on.
        """
        await asyncio.wrap_future(self._running().wake(weights_only))

    def get_version(self) -> int:
        return self._running().version

    def stats(self) -> dict[str, int]:
        """``num_running`` and ``num_waiting`` requests; ``num_prompt_tokens`` computed (of requests
        that join together with the same prompt, once) and ``num_generated_tokens`` so far; and the
        ``version``. Takes no lock.
        """
        return self._running().stats()

    def destroy(self) -> None:
        """End all requests as aborted and release the device. Idempotent.

        Raises:
            TimeoutError: The step that is running did not end within ``close_timeout_s``.
        """
        self._destroyed = True
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close(self.config.close_timeout_s)
            current_platform.empty_cache()
