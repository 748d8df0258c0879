"""A rollout engine whose tokens tell everything: a pure function of prompt, position and weight
version. It starts fast.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from helmsman.api.generation import GenerationRequest, GenerationResult, SamplingParams

MAX_NEW_TOKENS = 48
_VALUES = 1 << 20


def make_prompt(number: int, length: int) -> list[int]:
    """A prompt for a request that has so many tokens in the end. It tells its own length, since a
    request that is continued elsewhere comes with its tokens behind it."""
    return [3, number, length]


def make_request(request_id: str, number: int, length: int) -> GenerationRequest:
    """A request for a prompt of make_prompt."""
    sampling = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    return GenerationRequest(
        request_id=request_id, prompt_ids=make_prompt(number, length), sampling=sampling
    )


def token_at(number: int, position: int, version: int) -> int:
    """The token of a prompt at a position of its continuation, made by a version of the weights."""
    return version * _VALUES + int.from_bytes(
        hashlib.blake2b(b"%d/%d" % (number, position), digest_size=2).digest()
    )


def tokens_of(number: int, versions: Sequence[int]) -> list[int]:
    """The only tokens that a prompt can have where these versions have made them."""
    return [token_at(number, position, version) for position, version in enumerate(versions)]


class PureRollout:
    """Makes a few tokens at a time, many requests at once.

    Args:
        pause_s: seconds that it waits for each token, at least.
    """

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self.version = 0
        self.running: dict[str, bool] = {}
        """Request id -> whether it is to end early."""

    def initialize(self) -> None:
        """Nothing to load."""

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        """Continue after what the prompt has already, with whatever weights there are at each
        token.
        """
        if request.request_id in self.running:
            raise ValueError(f"{request.request_id} runs here already")
        self.running[request.request_id] = False
        try:
            return await self._generate(request)
        finally:
            del self.running[request.request_id]

    async def _generate(self, request: GenerationRequest) -> GenerationResult:
        num_prompt, number, length = request.prompt_ids[:3]
        first = len(request.prompt_ids) - num_prompt
        tokens: list[int] = []
        versions: list[int] = []
        while first + len(tokens) < length and len(tokens) < request.sampling.max_new_tokens:
            for _ in range(min(1 + len(tokens) % 4, length - first - len(tokens))):
                tokens.append(token_at(number, first + len(tokens), self.version))
                versions.append(self.version)
            await asyncio.sleep(self.pause_s)
            if self.running[request.request_id]:
                break
        ended = first + len(tokens) >= length
        return GenerationResult(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=[-1.0] * len(tokens),
            versions=versions,
            stop_reason="stop" if ended else "abort",
        )

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End these requests soon."""
        chosen = [id_ for id_ in self.running if request_ids is None or id_ in request_ids]
        for id_ in chosen:
            self.running[id_] = True
        return len(chosen)

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> int:
        """Take weights that tell their version."""
        if weights["version"] != version or version < self.version:
            raise ValueError(
                f"weights of version {weights['version']} as {version}, after {self.version}"
            )
        await asyncio.sleep(self.pause_s)
        self.version = version
        return version

    def get_version(self) -> int:
        """The version."""
        return self.version

    def destroy(self) -> None:
        """Nothing to release."""
