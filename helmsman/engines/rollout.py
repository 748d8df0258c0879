"""Rollout engine for Hugging Face causal language models.

It has a slot cache and continuous batching; one process and one device per instance. Requests join
and leave the batch between decoding steps. Weights are updated between two steps, and each token
records the version that produced it. Keys and values computed under earlier weights are kept: when
an update falls into a sequence, its log-probabilities are those with which its tokens were sampled,
not those of a fresh forward pass under either version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from helmsman.api.engines import InferenceEngine
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.platforms import current_platform
from helmsman.api.weights import Weights
from helmsman.engines._hf.decode_batch import DecodeBatch
from helmsman.engines._hf.decode_loop import DecodeLoop
from helmsman.engines._models.engine_checks import config_from, require_new, running
from helmsman.engines._models.model import build_model, max_positions, resolve_dtype
from helmsman.engines._serving.generation import check_request, check_samples_of_one
from helmsman.engines._weights.model_folder import check_model_folder
from helmsman.engines.rollout_config import RolloutConfig
from helmsman.engines.shared_base import SharedBase

logger = logging.getLogger(__name__)


class HFRolloutEngine(InferenceEngine):
    """A rollout instance on one device.

    Args:
        config: The configuration. Alternatively, pass its fields as keyword arguments.
        **fields: Fields of RolloutConfig; not allowed together with ``config``.

    Raises:
        ValueError: Both ``config`` and fields are given, a field is unknown, or a value has the
            wrong type (msgspec.ValidationError).
    """

    def __init__(self, config: RolloutConfig | None = None, **fields: Any) -> None:
        self.config = config_from(RolloutConfig, config, fields)
        self._loop: DecodeLoop | None = None
        self._vocab_size = 0
        self._max_len, self._limit = self.config.max_model_len, "max_model_len"
        self._destroyed = False
        self._base = SharedBase(self)

    def initialize(self) -> None:
        """Build the model on this instance's device and start decoding; the weights are version 0.

        Raises:
            ValueError: The model cannot be built, its folder is incomplete, or it has layers that
                this engine cannot decode.
            RuntimeError: The engine is running or was destroyed.
        """
        require_new("rollout engine", is_used=self._loop is not None or self._destroyed)
        if isinstance(self.config.model, str):
            check_model_folder(self.config.model, reads_checkpoints=True, needs_transformers=True)
        current_platform.set_device(0)
        device = current_platform.device(0)
        model = build_model(
            self.config.model, seed=self.config.seed, dtype=resolve_dtype(self.config.dtype)
        ).to(device)
        positions = max_positions(model.config)
        if positions is not None and positions < self._max_len:
            logger.warning(
                "max_model_len is %d, but the model has %d positions; sequences end there",
                self._max_len,
                positions,
            )
            self._max_len, self._limit = positions, "max_position_embeddings of the model"
        self._start(model)

    def _start(self, model: Any) -> None:
        slots = self.config.max_concurrency
        batch = DecodeBatch(model, num_slots=slots, max_len=self._max_len, device=model.device)
        self._vocab_size = batch.vocab_size
        self._loop = DecodeLoop(
            model,
            batch,
            max_len=self._max_len,
            max_prefill_tokens=self.config.max_prefill_tokens,
            base=self._base,
        )

    def beside(self) -> HFRolloutEngine:
        """Return the engine of another policy, with the same parameters and a cache of its own.

        Raises:
            RuntimeError: This engine is not running.
            ValueError: It has received a whole model, or was asleep.
            torch.OutOfMemoryError: The device has too little free memory for another cache.
        """
        loop = self._running()
        other: HFRolloutEngine = self._base.beside(self)
        try:
            other._start(loop.share().result())
        except BaseException:
            self._base.leave(other)
            raise
        return other

    def _running(self) -> DecodeLoop:
        return running("rollout engine", self._loop)

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one prompt; concurrent calls are batched.

        Raises:
            ValueError: The prompt is empty or too long, has tokens outside the vocabulary, or the
                request id is already in flight.
            RuntimeError: The engine is asleep or not running.
            Exception: The error of the decoding step that this request was part of.
        """
        return (await self.agenerate_samples([request]))[0]

    async def agenerate_samples(
        self, requests: Sequence[GenerationRequest]
    ) -> list[GenerationResult]:
        """Continue one prompt several times; the prompt is computed once.

        The samples join the batch together once there are slots for all of them (or, if there are
        more samples than that, ``max_concurrency`` slots).

        Args:
            requests: Requests that differ only in id and seed.

        Returns:
            Results in the order of the requests, when all have ended.

        Raises:
            ValueError: The prompts differ, or a request is invalid; see agenerate.
            RuntimeError: The engine is asleep or not running.
            Exception: The error of a decoding step that a request was part of.
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
        """End the given requests (None: all) with stop_reason 'abort'; return their number."""
        return await asyncio.wrap_future(self._running().abort(request_ids))

    async def update_weights(self, weights: Weights, version: int) -> int:
        """Load new weights in place and serve them as ``version``; decoding pauses meanwhile.

        Args:
            weights: All parameters by Hugging Face name, of any dtype and device: in memory, as
                files, or received by broadcasts.
            version: Their version.

        Returns:
            The version served.

        Raises:
            ValueError: Names or shapes do not fit the model, which is unchanged.
            RuntimeError: The engine is asleep. Or the update failed half-way
                (PartialWeightUpdateError): the engine generates nothing until an update succeeds.
            ConnectionError: A member of the weight-sync group is missing or late.
            OSError: The files cannot be read.
        """
        return await asyncio.wrap_future(self._running().update_weights(weights, version))

    async def sleep(self, level: int = 1) -> None:
        """Release device memory. Idempotent.

        Args:
            level: 1 drops the cache and keeps the weights on the host; 2 drops the weights too,
                also after an earlier sleep(1).

        Raises:
            ValueError: The level is not 1 or 2.
            RuntimeError: Requests are in flight.
        """
        await asyncio.wrap_future(self._running().sleep(level))

    async def wake(self, *, weights_only: bool = False) -> None:
        """Allocate the device memory again. Idempotent.

        Args:
            weights_only: Restore only the weights, so that an update can be loaded; a second wake()
                without it allocates the cache.

        Raises:
            torch.OutOfMemoryError: The device has too little free memory; the engine stays asleep.
        """
        await asyncio.wrap_future(self._running().wake(weights_only))

    def get_version(self) -> int:
        """Return the weight version that is served."""
        return self._running().version

    def stats(self) -> dict[str, int]:
        """Return counters of the engine. Takes no lock.

        Returns:
            ``num_running`` and ``num_waiting`` requests; ``num_prompt_tokens`` computed and
            ``num_generated_tokens`` so far; and the weight ``version``. A prompt shared by samples
            that join together counts once.
        """
        return self._running().stats()

    def destroy(self) -> None:
        """End all requests as aborted and release the device. Idempotent.

        Raises:
            TimeoutError: The running step did not end within ``close_timeout_s``.
        """
        self._destroyed = True
        self._base.leave(self)
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close(self.config.close_timeout_s)
            current_platform.empty_cache()
