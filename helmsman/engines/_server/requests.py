"""The requests that an inference server works on, from their admission to their ends, across updates of its weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from helmsman.api.errors import ServerLostError, ServerRequestError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.engines._admission import check_request
from helmsman.engines._server.http import ServerClient
from helmsman.engines._server.protocol import Asked, Chunk, Dialect
from helmsman.engines._server.sequences import Part, ServedSequence

_ENDING_S = 10.0
"""How long the server has to say that it has ended what a pause ended, before its connections are closed."""


class ServedRequests:
    """Those of one server. All methods run on one event loop.

    Args:
        client: of the server.
        dialect: of the server.
        model: as the server calls it.
        max_model_len: most tokens of a sequence; None where the server does not say.
        vocab_size: how many tokens the model knows; None where that is not known.
        has_ended: whether the server's process has ended.
        control_timeout_s: how long it may take to tell the server that nobody waits for a request any more.
    """

    def __init__(
        self,
        client: ServerClient,
        dialect: Dialect,
        *,
        model: str,
        max_model_len: int | None,
        vocab_size: int | None,
        has_ended: Callable[[], bool],
        control_timeout_s: float,
    ) -> None:
        self._client, self._dialect, self._model = client, dialect, model
        self._max_model_len, self._vocab_size = max_model_len, vocab_size
        self._has_ended, self._control_timeout_s = has_ended, control_timeout_s
        self.version = 0
        """Of the weights that are served."""
        self.sequences: dict[str, ServedSequence] = {}
        self.num_generated_tokens = 0
        self._holders: set[str] = set()
        """Who has it that nothing is sent to the server."""
        self._is_ending = False
        """Whether what the server ends as aborted is to go on later."""
        self._changed = asyncio.Condition()
        self._parts: set[Part] = set()
        self._num_parts = 0

    # --- for updates and sleep --------------------------------------------------------------------------------------------

    def hold(self, holder: str) -> None:
        """Send nothing more to the server until the holder lets go."""
        self._holders.add(holder)

    async def let_go(self, holder: str) -> None:
        """Send again what waits, unless there is another holder."""
        self._holders.discard(holder)
        await self.notify()

    def keep_what_the_server_ends(self, is_ending: bool) -> None:
        """Whether what the server ends as aborted goes on from there, once nobody holds it; else it is given back."""
        self._is_ending = is_ending

    async def until_none_runs(self) -> None:
        """Wait until a server that has been paused has ended all that it was sent, and read no longer what it has not ended in
        time. What has no token loses nothing, and may have come to the server after the pause, to wait there till its end."""
        for part in list(self._parts):
            if not part.has_tokens:
                part.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDING_S), self._changed:
                await self._changed.wait_for(lambda: not self._parts)
        for part in list(self._parts):
            part.close()

    async def notify(self) -> None:
        """Have those look again who wait for something to change."""
        async with self._changed:
            self._changed.notify_all()

    # --- for callers ------------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Continue prompts, which are the same, to their ends. Raises: see ServerEngine.agenerate."""
        with contextlib.ExitStack() as stack:
            sequences = []
            for request in requests:
                sequences.append(self._admit(request))
                stack.callback(self.sequences.pop, request.request_id)
            sampling = [request.sampling for request in requests]
            alike = all(each == sampling[0] and each.seed is None for each in sampling)
            if len(sequences) > 1 and self._dialect.samples_together and alike:
                await self._run_part(sequences)
            outcomes = await asyncio.gather(*map(self._to_its_end, sequences), return_exceptions=True)
        for error in outcomes:
            if error is not None:
                raise error
        return [sequence.result() for sequence in sequences]

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """End these early, None for all; returns how many were ended."""
        found = list(self.sequences) if request_ids is None else request_ids
        num_ended = sum(self.sequences[id_].end("abort") for id_ in found if id_ in self.sequences)
        for part in self._parts:
            if not part.is_wanted:
                part.close()
        await self.notify()
        return num_ended

    def _admit(self, request: GenerationRequest) -> ServedSequence:
        if request.request_id in self.sequences:
            raise ValueError(f"request {request.request_id!r} is in flight already")
        check_request(request, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
        sequence = self.sequences[request.request_id] = ServedSequence(request, self._max_model_len)
        return sequence

    # --- parts ------------------------------------------------------------------------------------------------------------

    async def _to_its_end(self, sequence: ServedSequence) -> None:
        while sequence.stop_reason is None:
            await self._run_part([sequence])

    async def _run_part(self, sequences: Sequence[ServedSequence]) -> None:
        """Have the server go on with sequences, until it or an update has ended that."""

        def have_ended() -> bool:
            return all(sequence.stop_reason is not None for sequence in sequences)

        async with self._changed:
            await self._changed.wait_for(lambda: not self._holders or self._has_ended() or have_ended())
        if have_ended():
            return
        part = Part(sequences, self.version, self._num_parts)
        self._num_parts += 1
        self._parts.add(part)
        part.reading = asyncio.ensure_future(self._read(part))
        try:
            await asyncio.wait([part.reading])
            if part.reading.cancelled():
                await self._forget(part)
            else:
                part.reading.result()
        finally:
            part.close()
            self._parts.discard(part)
            await self.notify()
        for sequence in sequences:
            sequence.settle()

    async def _read(self, part: Part) -> None:
        first = part.sequences[0]
        asked = Asked(
            model=self._model,
            request_id=part.request_id,
            token_ids=first.token_ids,
            sampling=first.request.sampling,
            max_new_tokens=first.num_left,
            seed=first.seed,
            num_samples=len(part.sequences),
        )
        call = self._dialect.generation(asked)
        counts = [0] * len(part.sequences)
        async with contextlib.aclosing(self._client.events(call.route, call.body)) as events:
            async for event in events:
                try:
                    chunks = self._dialect.chunks(event, counts)
                    if strange := [chunk.sample for chunk in chunks if not 0 <= chunk.sample < len(counts)]:
                        raise ValueError(f"it is of sample {strange[0]}, and {len(counts)} were asked for")
                except ValueError as error:
                    await self._client.refuse(call.route, 200, str(error), "tokens with their log-probabilities")
                for chunk in chunks:
                    self._take(part, chunk)
                    counts[chunk.sample] += len(chunk.token_ids)
        unended = [count for index, count in enumerate(counts) if index not in part.has_ended]
        # vLLM says nothing of what a pause has ended before its first token.
        if any(unended) or (unended and not self._is_ending):
            said = "the events ended before the sequences"
            await self._client.refuse(call.route, 200, said, "a reason for the end of each")

    def _take(self, part: Part, chunk: Chunk) -> None:
        sequence = part.sequences[chunk.sample]
        sequence.add(chunk.token_ids, chunk.logprobs, part.version)
        part.has_tokens = part.has_tokens or bool(chunk.token_ids)
        self.num_generated_tokens += len(chunk.token_ids)
        if chunk.stop_reason is None:
            return
        part.has_ended.add(chunk.sample)
        if chunk.stop_reason != "abort":
            sequence.end(chunk.stop_reason)
        elif not self._is_ending:
            sequence.settle()
            sequence.end("abort")  # by the server, for reasons of its own: the caller may go on from here

    async def _forget(self, part: Part) -> None:
        """Tell the server that nobody reads a part any more, where the end of the connection does not."""
        call = self._dialect.abort(part.request_id)
        if call is not None and not self._client.is_closed:
            # What was read of it counts all the same.
            with contextlib.suppress(ServerRequestError, ServerLostError, TimeoutError):
                await self._client.call("POST", call.route, body=call.body, limit_s=self._control_timeout_s)
