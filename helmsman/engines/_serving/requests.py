"""Requests in flight on a server, from admission to result, across weight updates.

Each request is one or more consecutive attempts: when an update interrupts one, the next attempt
continues after its tokens. The version of a token is the version served when it arrives, so all
tokens must have arrived before the version changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from helmsman.api.generation import GenerationRequest, GenerationResult, StopReason
from helmsman.engines._serving.generation import Generation, already_in_flight, check_request


class Attempt:
    """One request to the server: the next tokens of some generations of one prompt.

    Its number makes its id unique, since the server may not have finished an earlier attempt of the
    same request.
    """

    def __init__(self, generations: Sequence[Generation], number: str) -> None:
        self.generations = generations
        # No id is the beginning of another: SGLang aborts all that begin with one.
        self.request_id = f"{generations[0].request.request_id}.{number}."
        self.has_ended: set[int] = set()
        """Indices of the generations that the server has ended, for any reason."""
        self.has_tokens = False
        self.is_closing = False
        self.reading: asyncio.Future[None] | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether any generation still needs tokens of this attempt."""
        return any(
            each.stop_reason is None and index not in self.has_ended
            for index, each in enumerate(self.generations)
        )

    def close(self) -> None:
        """Stop reading the attempt."""
        self.is_closing = True
        if self.reading is not None:
            self.reading.cancel()


class Requests:
    """All requests of one server. Its methods run on one event loop.

    Args:
        read: Sends an attempt to the server and calls ``take`` until all of it has ended.
        has_ended: Whether the server has ended. If so, nothing is held back, so that ``read``
            raises.
        max_model_len: Maximum tokens of a sequence; None if unknown.
        vocab_size: Size of the vocabulary; None if unknown.
        samples_together: Whether one attempt may have several samples, if they have no seeds.
        forget: Called when an attempt is closed, for servers that do not react to a closed
            connection.
        policy: Distinguishes the attempts from those of another policy on the server.
    """

    def __init__(
        self,
        read: Callable[[Attempt], Awaitable[None]],
        *,
        has_ended: Callable[[], bool],
        max_model_len: int | None,
        vocab_size: int | None,
        samples_together: bool = False,
        forget: Callable[[Attempt], Awaitable[None]] | None = None,
        policy: str = "",
    ) -> None:
        self._policy = policy
        self._read, self._forget, self._has_ended = read, forget, has_ended
        self._max_model_len, self._vocab_size = max_model_len, vocab_size
        self._samples_together = samples_together
        self.version = 0
        """Weight version being served."""
        self.generations: dict[str, Generation] = {}
        self.num_generated_tokens = 0
        self.is_held = False
        """While set, nothing is sent to the server, and generations that it aborts continue after
        release().
        """
        self._changed = asyncio.Condition()
        self._attempts: set[Attempt] = set()
        self._num_attempts = 0

    def hold(self) -> None:
        """Send no more attempts until release()."""
        self.is_held = True

    async def release(self) -> None:
        """Send attempts again."""
        self.is_held = False
        await self.notify()

    def close_attempts(self, *, begun: bool) -> None:
        """Close attempts without a token, which lose nothing; with ``begun`` also the others."""
        for attempt in self._attempts:
            if begun or not attempt.has_tokens:
                attempt.close()

    async def until_ended(self, *, closing: bool = False) -> None:
        """Wait until no attempt runs; with ``closing``, until no closed attempt runs."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: not any(each.is_closing or not closing for each in self._attempts)
            )

    def keep_versions(self) -> None:
        """Give all tokens of requests in flight the version that is served now."""
        for each in self.generations.values():
            if each.version is None:
                each.version = self.version

    async def leave_adapters(self, adapters: Sequence[Any]) -> None:
        """Continue requests without these adapters, under the version that is served.

        Requests are held; those that use one of the adapters are computed again.
        """
        left = {id(each) for each in adapters}
        for attempt in self._attempts:
            if id(attempt.generations[0].adapter) in left:
                attempt.close()
        await self.until_ended(closing=True)
        for each in self.generations.values():
            each.version = None
            if id(each.adapter) in left:
                each.adapter = None

    async def notify(self) -> None:
        """Wake all waiters to check their conditions again."""
        async with self._changed:
            self._changed.notify_all()

    async def generate(
        self,
        requests: Sequence[GenerationRequest],
        adapter: Any = None,
        version: int | None = None,
    ) -> list[GenerationResult]:
        """Continue one prompt, once for each request.

        Args:
            requests: Requests with the same prompt.
            adapter: LoRA adapter of the server; None for none.
            version: Version of a trained adapter, for all of their tokens; None for the version
                that is served when a token arrives.

        Returns:
            Results in the order of the requests.

        Raises:
            ValueError: A request is invalid or its id is already in flight.
            Exception: An error of ``read``.
        """
        with contextlib.ExitStack() as stack:
            generations = []
            for request in requests:
                generations.append(self._admit(request, adapter, version))
                stack.callback(self.generations.pop, request.request_id)
            alike = all(
                each.sampling == requests[0].sampling and each.sampling.seed is None
                for each in requests
            )
            if len(generations) > 1 and self._samples_together and alike:
                await self._attempt(generations)
            running = [asyncio.ensure_future(self._to_its_end(each)) for each in generations]
            try:
                await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                if not all(each.done() for each in running):
                    # One sample failed or the call was cancelled; no caller waits for the others.
                    await self.abort([each.request_id for each in requests])
                    await asyncio.wait(running)
            for each in running:
                each.result()
        return [each.result() for each in generations]

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """End requests early (None: all); return how many were ended."""
        found = list(self.generations) if request_ids is None else request_ids
        num_ended = sum(
            self.generations[id_].end("abort") for id_ in found if id_ in self.generations
        )
        for attempt in self._attempts:
            if not attempt.is_wanted:
                attempt.close()
        await self.notify()
        return num_ended

    def _admit(self, request: GenerationRequest, adapter: Any, version: int | None) -> Generation:
        if request.request_id in self.generations:
            raise already_in_flight(request.request_id)
        check_request(request, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
        generation = self.generations[request.request_id] = Generation(
            request, self._max_model_len, adapter, version
        )
        return generation

    async def _to_its_end(self, generation: Generation) -> None:
        while generation.stop_reason is None:
            await self._attempt([generation])

    async def _attempt(self, generations: Sequence[Generation]) -> None:
        """Continue generations on the server until they end or an update interrupts them."""

        def are_over() -> bool:
            return all(each.stop_reason is not None for each in generations)

        async with self._changed:
            await self._changed.wait_for(
                lambda: not self.is_held or self._has_ended() or are_over()
            )
        if are_over():
            return
        attempt = Attempt(generations, f"{self._num_attempts}{self._policy}")
        self._num_attempts += 1
        self._attempts.add(attempt)
        attempt.reading = asyncio.ensure_future(self._read(attempt))
        try:
            await asyncio.wait([attempt.reading])
            if not attempt.reading.cancelled():
                attempt.reading.result()
            elif self._forget is not None:
                await self._forget(attempt)
        finally:
            attempt.close()
            self._attempts.discard(attempt)
            await self.notify()
        for each in generations:
            each.settle()  # the server may have been paused before it reported the end

    def take(
        self,
        attempt: Attempt,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        reason: StopReason | None,
    ) -> None:
        """Add tokens of an attempt's generation, and its stop reason if it has ended."""
        generation = attempt.generations[index]
        version = self.version if generation.version is None else generation.version
        generation.add(token_ids, logprobs, version)
        attempt.has_tokens = attempt.has_tokens or bool(token_ids)
        self.num_generated_tokens += len(token_ids)
        if reason is None:
            return
        attempt.has_ended.add(index)
        if reason != "abort":
            generation.end(reason)
        elif not self.is_held:
            generation.settle()
            # The server aborted it on its own; the caller may resume from here.
            generation.end("abort")
