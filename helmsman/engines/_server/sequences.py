"""The requests of an inference server's engine: what each has so far, and how it goes on."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from helmsman.api.generation import GenerationRequest, GenerationResult, StopReason


class ServedSequence:
    """A request and what it has generated, maybe by several requests to the server, one after another.

    Args:
        request: The request.
        max_model_len: most tokens of a sequence; None for no limit that is known.
    """

    def __init__(self, request: GenerationRequest, max_model_len: int | None) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.stop_reason: StopReason | None = None
        room = request.sampling.max_new_tokens
        self._most = room if max_model_len is None else min(room, max_model_len - len(request.prompt_ids))

    @property
    def num_left(self) -> int:
        """Tokens that it may still get."""
        return self._most - len(self.tokens)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and what was generated."""
        return [*self.request.prompt_ids, *self.tokens]

    @property
    def seed(self) -> int | None:
        """For the server's next request, from 0 to 2**63 - 1. A server draws from its first token on, so that the seed itself
        would give a sequence that was cut the same random numbers again."""
        seed, offset = self.request.sampling.seed, self.request.num_generated + len(self.tokens)
        if seed is None or (offset == 0 and seed < 2**63):
            return seed
        return int.from_bytes(hashlib.blake2b(f"{seed} {offset}".encode(), digest_size=8).digest()) >> 1

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Take tokens that this version has generated, unless it has ended."""
        if self.stop_reason is not None:
            return
        self.tokens += token_ids
        self.logprobs += logprobs
        self.versions += [version] * len(token_ids)

    def end(self, reason: StopReason) -> bool:
        """End it; returns whether this did."""
        if self.stop_reason is not None:
            return False
        self.stop_reason = reason
        return True

    def settle(self) -> None:
        """End it where its last token does: the server may have been stopped before it could say so."""
        if self.tokens and self.tokens[-1] in self.request.sampling.stop_token_ids:
            self.end("stop")
        elif self.num_left <= 0:
            self.end("length")

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


class Part:
    """One request of the server, under way: some sequences by one version of the weights.

    Args:
        sequences: whose next tokens it brings.
        version: of the weights that are served.
        number: no other part of the engine has it: on the server, an earlier one of the same sequence may not be quite over.
    """

    def __init__(self, sequences: Sequence[ServedSequence], version: int, number: int) -> None:
        self.sequences = list(sequences)
        self.version = version
        self.request_id = f"{sequences[0].request.request_id}.{number}"
        self.has_ended: set[int] = set()
        """Of its sequences, those that the server has ended, by whatever reason."""
        self.has_tokens = False
        """Whether it has brought any."""
        self.reading: asyncio.Task[None] | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether any of its sequences waits for more of it."""
        return any(
            sequence.stop_reason is None and index not in self.has_ended for index, sequence in enumerate(self.sequences)
        )

    def close(self) -> None:
        """Read no more of it; the server sees its connection end."""
        if self.reading is not None:
            self.reading.cancel()
