"""Stream of events by which an inference server answers a generation."""

from __future__ import annotations

import contextlib

from helmsman.engines._server.http import ServerClient
from helmsman.engines._server.protocol import Call, Dialect
from helmsman.engines._serving.requests import Attempt, Requests


async def read_attempt(
    client: ServerClient, dialect: Dialect, call: Call, attempt: Attempt, requests: Requests
) -> None:
    """Send an attempt and add its tokens to the requests, until the server has ended all of it.

    Raises:
        ServerRequestError: The server refused the call, or its events are malformed.
        ServerLostError: The server has ended or its connection broke.
    """
    counts = [0] * len(attempt.generations)
    async with contextlib.aclosing(client.events(call.route, call.body)) as events:
        async for event in events:
            try:
                chunks = dialect.chunks(event, counts)
                if unknown := [
                    chunk.sample for chunk in chunks if not 0 <= chunk.sample < len(counts)
                ]:
                    raise ValueError(
                        f"it is for sample {unknown[0]}, but the request was for "
                        f"{len(counts)}, counted from 0"
                    )
            except ValueError as error:
                await client.refuse(
                    call.route, 200, str(error), "tokens with their log-probabilities"
                )
            for chunk in chunks:
                requests.take(
                    attempt, chunk.sample, chunk.token_ids, chunk.logprobs, chunk.stop_reason
                )
                counts[chunk.sample] += len(chunk.token_ids)
    unended = [count for index, count in enumerate(counts) if index not in attempt.has_ended]
    # vLLM sends nothing for a sequence that a pause has ended before its first token.
    if any(unended) or (unended and not requests.is_held):
        said = "the events ended before the sequences did"
        await client.refuse(call.route, 200, said, "a reason for the end of each")
