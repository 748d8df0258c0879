"""A request on its way through vLLM, in one attempt or several."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from helmsman.api.generation import GenerationRequest, GenerationResult, StopReason


class Flight:
    """A request, the adapter that it uses (None for none), and what it has generated."""

    def __init__(self, request: GenerationRequest, adapter: Any) -> None:
        self.request, self.adapter = request, adapter
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.attempt: asyncio.Task[None] | None = None
        self.stop_reason: StopReason | None = None

    def take(self, output: Any, version: int) -> None:
        """Take in what vLLM has sent, which may be its end."""
        part = output.outputs[0]
        tokens = list(part.token_ids)
        self.tokens += tokens
        self.logprobs += [entry[token].logprob for token, entry in zip(tokens, part.logprobs or (), strict=True)]
        self.versions += [version] * len(tokens)
        reason = part.finish_reason
        if reason not in (None, "stop", "length", "abort"):
            raise RuntimeError(f"vLLM ended request {self.request.request_id!r} with {reason!r}; its log says more")
        self.stop_reason = reason

    def result(self) -> GenerationResult:
        """What it has, once it has ended."""
        assert self.stop_reason is not None
        return GenerationResult(
            request_id=self.request.request_id,
            token_ids=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            stop_reason=self.stop_reason,
        )


def seed_of(seed: int | None, num_drawn: int) -> int | None:
    """vLLM draws a request's numbers from its seed's first on; what goes on after so many draws gets a stream of its own."""
    if seed is None:
        return None
    if not num_drawn:
        return seed % 2**63
    return int.from_bytes(hashlib.sha256(f"{seed}/{num_drawn}".encode()).digest()[:7], "little")
