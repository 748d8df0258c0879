"""The requests that a server generates, from their admission to their ends, across updates of its
weights.

Each request is one attempt or several in a row: one that an update cuts continues as another, after
its tokens so far. The version of a token is the one that is served when it arrives, so all tokens
must have arrived before the version changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from helmsman.api.generation import GenerationRequest, GenerationResult, StopReason
from helmsman.engines._serving.generation import Generation, already_in_flight, check_request


class Attempt:
    """One request to the server: the next tokens of some generations of one prompt. Its number
    makes its id unique, since an earlier attempt of the same request may not be quite over on the
    server.
    """

    def __init__(self, generations: Sequence[Generation], number: int) -> None:
        self.generations = generations
        self.request_id = f"{generations[0].request.request_id}.{number}"
        self.has_ended: set[int] = set()
        """Indices of the generations that the server has ended, for whatever reason."""
        self.has_tokens = False
        self.is_closing = False
        self.reading: asyncio.Future[None] | None = None

    @property
    def is_wanted(self) -> bool:
        return any(
            each.stop_reason is None and index not in self.has_ended
            for index, each in enumerate(self.generations)
        )

    def close(self) -> None:
        self.is_closing = True
        if self.reading is not None:
            self.reading.cancel()


class Requests:
    """All requests of one server. The methods run on one event loop. ``read`` has the server
    generate an attempt, and calls ``take`` until all of it has ended; ``forget`` is called when an
    attempt is closed, for servers to which the end of the reader says nothing. When the server has
    ended nothing is held back, so that ``read`` raises. ``samples_together`` says whether one
    attempt may have several samples, where these have no seeds.
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
    ) -> None:
        self._read, self._forget, self._has_ended = read, forget, has_ended
        self._max_model_len, self._vocab_size = max_model_len, vocab_size
        self._samples_together = samples_together
        self.version = 0
        """Weight version that is served."""
        self.generations: dict[str, Generation] = {}
        self.num_generated_tokens = 0
        self.is_held = False
        """Nothing is sent to the server, and generations that it ends as aborted continue after
        release.
        """
        self._changed = asyncio.Condition()
        self._attempts: set[Attempt] = set()
        self._num_attempts = 0

    def hold(self) -> None:
        self.is_held = True

    async def release(self) -> None:
        self.is_held = False
        await self.notify()

    def close_attempts(self, *, begun: bool) -> None:
        """Close the attempts that have no token, which lose nothing, and with ``begun`` the others
        too.
        """
        for attempt in self._attempts:
            if begun or not attempt.has_tokens:
                attempt.close()

    async def until_ended(self, *, closing: bool = False) -> None:
        """Wait until no attempt runs, or with ``closing`` none that was closed."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: not any(each.is_closing or not closing for each in self._attempts)
            )

    async def notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def generate(
        self, requests: Sequence[GenerationRequest], adapter: Any = None
    ) -> list[GenerationResult]:
        """Continue one prompt, once for each request. Raises: ValueError for a wrong one; what
        ``read`` raises.
        """
        with contextlib.ExitStack() as stack:
            generations = []
            for request in requests:
                generations.append(self._admit(request, adapter))
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
                    # no caller waits for the other samples of one that has failed
                    await self.abort([each.request_id for each in requests])
                    await asyncio.wait(running)
            for each in running:
                each.result()
        return [each.result() for each in generations]

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """End these early, None for all; returns how many were ended."""
        found = list(self.generations) if request_ids is None else request_ids
        num_ended = sum(
            self.generations[id_].end("abort") for id_ in found if id_ in self.generations
        )
        for attempt in self._attempts:
            if not attempt.is_wanted:
                attempt.close()
        await self.notify()
        return num_ended

    def _admit(self, request: GenerationRequest, adapter: Any) -> Generation:
        if request.request_id in self.generations:
            raise already_in_flight(request.request_id)
        check_request(request, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
        generation = self.generations[request.request_id] = Generation(
            request, self._max_model_len, adapter
        )
        return generation

    async def _to_its_end(self, generation: Generation) -> None:
        while generation.stop_reason is None:
            await self._attempt([generation])

    async def _attempt(self, generations: Sequence[Generation]) -> None:
        """Have the server go on with generations, until it or an update has ended that."""

        def are_over() -> bool:
            return all(each.stop_reason is not None for each in generations)

        async with self._changed:
            await self._changed.wait_for(
                lambda: not self.is_held or self._has_ended() or are_over()
            )
        if are_over():
            return
        attempt = Attempt(generations, self._num_attempts)
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
            each.settle()  # the server may have been stopped before it could say so

    def take(
        self,
        attempt: Attempt,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        reason: StopReason | None,
    ) -> None:
        """Take tokens of an attempt's generation, and the reason of its end where it has ended."""
        generation = attempt.generations[index]
        generation.add(token_ids, logprobs, self.version)
        attempt.has_tokens = attempt.has_tokens or bool(token_ids)
        self.num_generated_tokens += len(token_ids)
        if reason is None:
            return
        attempt.has_ended.add(index)
        if reason != "abort":
            generation.end(reason)
        elif not self.is_held:
            generation.settle()
            # by the server, for reasons of its own: the caller may go on from here
            generation.end("abort")
