"""A request from admission to result: checks, generated tokens and continuation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from helmsman.api.generation import GenerationRequest, GenerationResult, StopReason


def check_request(
    request: GenerationRequest,
    *,
    max_model_len: int | None,
    vocab_size: int | None,
    limit: str = "max_model_len",
) -> None:
    """Raise ValueError for a request that cannot be served; a limit of None is unknown.

    ``limit`` names the setting that ``max_model_len`` comes from.
    """
    prompt = request.prompt_ids
    name = f"request {request.request_id!r}"
    seed = request.sampling.seed
    if not prompt:
        raise ValueError(f"{name} has an empty prompt; expected at least one token")
    if max_model_len is not None and len(prompt) >= max_model_len:
        raise ValueError(
            f"{name} has a prompt of {len(prompt)} tokens, which leaves no room for a "
            "continuation within "
            f"{limit}={max_model_len}"
        )
    if min(prompt) < 0 or (vocab_size is not None and max(prompt) >= vocab_size):
        wrong = next(
            token
            for token in prompt
            if token < 0 or (vocab_size is not None and token >= vocab_size)
        )
        expected = "0 or more" if vocab_size is None else f"0 to {vocab_size - 1}"
        raise ValueError(f"{name} has the token {wrong} in its prompt; expected {expected}")
    if seed is not None and not 0 <= seed < 2**64:
        raise ValueError(f"{name} has the seed {seed}; expected one from 0 to 2**64 - 1")


def check_samples_of_one(requests: Sequence[GenerationRequest]) -> None:
    """Raise ValueError unless all requests have the same prompt."""
    for request in requests:
        if request.prompt_ids != requests[0].prompt_ids:
            raise ValueError(
                f"requests {requests[0].request_id!r} and {request.request_id!r} have different "
                "prompts; agenerate_samples expects the same prompt in all"
            )


def check_level(level: int) -> None:
    """Raise ValueError unless the sleep level is 1 or 2."""
    if level not in (1, 2):
        raise ValueError(
            f"level is {level}; expected 1, which keeps the weights on the host, or 2, which "
            "drops them"
        )


def already_in_flight(request_id: str) -> ValueError:
    """Build the error for a duplicate request id."""
    return ValueError(
        f"the request id {request_id!r} is already in flight; ids of requests in flight are unique"
    )


class Generation:
    """A request with its LoRA adapter and the tokens generated so far, in one or more attempts."""

    def __init__(
        self,
        request: GenerationRequest,
        max_model_len: int | None,
        adapter: Any = None,
        version: int | None = None,
    ) -> None:
        self.request, self.adapter = request, adapter
        self.version = version
        """Version under which it ends, beside newer adapters; None if its tokens have the server's.
        """
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.stop_reason: StopReason | None = None
        most = request.sampling.max_new_tokens
        self._most = (
            most if max_model_len is None else min(most, max_model_len - len(request.prompt_ids))
        )

    @property
    def num_left(self) -> int:
        """Number of tokens that may still be generated."""
        return self._most - len(self.tokens)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.request.prompt_ids, *self.tokens]

    @property
    def attempt_seed(self) -> int | None:
        """Seed of the next attempt, 0 to 2**63 - 1; None if the request has none.

        Servers restart their random numbers with each attempt, so the same seed would give a
        continuation the same random numbers again.
        """
        seed, offset = self.request.sampling.seed, self.request.num_generated + len(self.tokens)
        if seed is None or (offset == 0 and seed < 2**63):
            return seed
        return (
            int.from_bytes(hashlib.blake2b(f"{seed} {offset}".encode(), digest_size=8).digest())
            >> 1
        )

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append tokens generated under this weight version, unless the generation has ended."""
        if self.stop_reason is None:
            self.tokens += token_ids
            self.logprobs += logprobs
            self.versions += [version] * len(token_ids)

    def end(self, reason: StopReason) -> bool:
        """Set the stop reason; return False if there already is one."""
        if self.stop_reason is not None:
            return False
        self.stop_reason = reason
        return True

    def settle(self) -> None:
        """End the generation if its last token is a stop token or no tokens are left."""
        if self.tokens and self.tokens[-1] in self.request.sampling.stop_token_ids:
            self.end("stop")
        elif self.num_left <= 0:
            self.end("length")

    def result(self) -> GenerationResult:
        """Return the result of an ended generation."""
        assert self.stop_reason is not None
        return GenerationResult(
            request_id=self.request.request_id,
            token_ids=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            stop_reason=self.stop_reason,
        )
