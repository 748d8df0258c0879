"""The prompts of a script as requests: their ids, their samples, and what they go on from."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from helmsman.api.generation import GenerationRequest, GenerationResult, SamplingParams

Prompt: TypeAlias = Sequence[int] | GenerationRequest
"""Token ids, or a request that the caller made, with an id and sampling parameters of its own."""


class RequestMaker:
    """Makes the requests of one role.

    Args:
        role: what their ids begin with.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        self._numbers = itertools.count()

    def make(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        resume_from: GenerationResult | None = None,
        name: str = "the prompt",
    ) -> GenerationRequest:
        """One request. Raises: ValueError for a prompt that makes no sense, called by this name, or a ``resume_from`` that it
        cannot go on from."""
        if isinstance(prompt, GenerationRequest):
            if sampling is not None:
                raise ValueError(f"{name} is a GenerationRequest with sampling parameters of its own; leave `sampling` out")
            request = prompt
        else:
            request = GenerationRequest(
                request_id=f"{self._role}-{next(self._numbers)}",
                prompt_ids=_token_ids(prompt, name),
                sampling=sampling or SamplingParams(),
            )
        if not request.prompt_ids:
            raise ValueError(f"{name} is empty; expected at least one token id")
        if resume_from is not None:
            require_resumable(request, resume_from)
        return request

    def make_all(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None, num_samples: int = 1
    ) -> list[GenerationRequest]:
        """The requests of several prompts, those of a prompt in a row. Raises: ValueError for what makes no sense."""
        each = [sampling] * len(prompts) if sampling is None or isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} sampling parameters for {len(prompts)} prompts; give one for all, or one for each")
        requests = [self.make(p, s, name=f"prompt {i}") for i, (p, s) in enumerate(zip(prompts, each, strict=True))]
        return [sample for request in requests for sample in samples_of(request, num_samples)]


def _token_ids(prompt: object, name: str) -> list[int]:
    if isinstance(prompt, str) or not isinstance(prompt, Iterable):
        raise ValueError(f"{name} is of type {type(prompt).__name__}; expected its token ids, or a GenerationRequest")
    return [int(token) for token in prompt]


def samples_of(request: GenerationRequest, num_samples: int) -> list[GenerationRequest]:
    """A request as its samples: itself when it is to have one, else requests with the ids ``id#0``, ``id#1``... and seeds of
    their own. Raises: ValueError for a number below 1."""
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; expected 1 or more")
    if num_samples == 1:
        return [request]
    return [
        msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}#{sample}",
            sampling=msgspec.structs.replace(request.sampling, seed=sample_seed(request.sampling.seed, sample)),
        )
        for sample in range(num_samples)
    ]


def sample_seed(seed: int | None, sample: int) -> int | None:
    """The seed of a prompt's sample: None for None, else a function of both, of 63 bits, however many samples there are. The
    first sample has the seed itself, so it is what the prompt alone would have."""
    if seed is None or sample == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {sample}".encode(), digest_size=8).digest()) >> 1


def require_resumable(request: GenerationRequest, partial: GenerationResult) -> None:
    """Raises: ValueError when a request cannot go on from a result, or has nothing to go on to."""
    name, num_tokens, sampling = f"resume_from, the result of {partial.request_id!r},", len(partial.token_ids), request.sampling
    if partial.stop_reason != "abort":
        raise ValueError(f"{name} has come to its end (stop_reason {partial.stop_reason!r}); only an aborted one goes on")
    if not num_tokens == len(partial.logprobs) == len(partial.versions):
        raise ValueError(
            f"{name} has {num_tokens} tokens, {len(partial.logprobs)} log-probabilities and {len(partial.versions)} versions; "
            "expected one of each for every token"
        )
    if num_tokens >= sampling.max_new_tokens:
        raise ValueError(
            f"{name} has {num_tokens} tokens already, and max_new_tokens, which counts them, is {sampling.max_new_tokens}; "
            "raise it, or use the result as it is"
        )
    if num_tokens and partial.token_ids[-1] in sampling.stop_token_ids:
        raise ValueError(f"{name} ends with the stop token {partial.token_ids[-1]}; use it as it is")
