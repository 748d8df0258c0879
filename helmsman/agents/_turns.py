"""Generates the model's answers to agents' requests; a request sent twice gets the same answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from array import array
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from helmsman import GenerationResult, RequestOptions, RolloutController, SamplingParams
from helmsman.agents._conversation import Turn
from helmsman.agents._messages import BadRequestError, ChatRequest, ChatResponse
from helmsman.agents._session import AgentSession
from helmsman.agents._template import ChatTemplate
from helmsman.api.errors import EngineCallError

T = TypeVar("T")
log = logging.getLogger(__name__)

_MOST_ANSWERS = 128
_MOST_WITH_KEY, _MOST_WITHOUT = 64, 4
"""Requests of a session whose answers are kept, in case that they are sent again."""
_SEGMENT = 64
"""Tokens generated between two searches for stop texts; engines receive no stop texts."""


class RequestKey(msgspec.Struct, frozen=True):
    """Identifies a request that may be sent again."""

    name: str
    """The key that the agent gave, or a digest of the body."""
    digest: bytes
    """Digest of the body."""
    is_given: bool
    """Whether the agent gave the key: it will send the request again until it has an answer."""
    is_repeated: bool
    """Whether the same request may have been received before."""


class TurnRequest:
    """A turn in progress or done, and the HTTP requests that wait for its answer."""

    def __init__(self, task: asyncio.Task[tuple[ChatResponse, list[Turn]]], digest: bytes) -> None:
        self.task, self.digest = task, digest
        self.num_waiting = 0
        self.is_delivered = False
        """Whether an agent has received the answer, as far as the server can tell."""

    async def answer(self) -> ChatResponse:
        """Wait for the answer. Cancelling the wait does not cancel the turn."""
        return (await asyncio.shield(self.task))[0]


class Turns:
    """Generates the turns of sessions on the instances of a rollout; used on one event loop."""

    def __init__(
        self,
        rollout: RolloutController,
        template: ChatTemplate,
        model: str,
        max_context: int | None,
        max_in_flight: int,
    ) -> None:
        self.model = model
        self._rollout, self._template = rollout, template
        self._max_context, self._max_in_flight = max_context, max_in_flight
        self._running: set[asyncio.Task[Any]] = set()
        self._has_warned = False

    @property
    def is_full(self) -> bool:
        """Whether a further turn must wait."""
        return len(self._running) >= self._max_in_flight

    async def wait_ended(self) -> None:
        """Wait until the turns in progress have ended, which were cancelled."""
        await asyncio.gather(*self._running, return_exceptions=True)

    def join(self, session: AgentSession, request: ChatRequest, key: RequestKey) -> TurnRequest:
        """Start a turn, or return the one that the same request has started.

        Raises:
            BadRequestError: The session is closed, the key belongs to another request, or too many
                turns are in progress.
        """
        known: TurnRequest | None = session.requests.get(key.name) if key.is_repeated else None
        if known is not None:
            if known.digest != key.digest:
                raise BadRequestError(
                    f"the idempotency key {key.name!r:.80} was used for a different request; use a "
                    "new key",
                    code="idempotency_key_reused",
                    status=422,
                )
            return known
        if self.is_full:
            raise BadRequestError(
                "too many turns are in progress; try again later",
                code="rate_limit_exceeded",
                status=429,
            )
        made = TurnRequest(self.begin(session, request), key.digest)
        session.requests[key.name] = made
        session.requests.move_to_end(key.name)
        alike = [name for name in session.requests if name.startswith("key:") == key.is_given]
        for name in alike[: -(_MOST_WITH_KEY if key.is_given else _MOST_WITHOUT)]:
            del session.requests[name]

        def ended(task: asyncio.Task[Any]) -> None:
            if task.cancelled() or task.exception() is not None:
                self._forget(session, made)

        made.task.add_done_callback(ended)
        return made

    @contextlib.contextmanager
    def waiting(self, session: AgentSession, turn: TurnRequest, key: RequestKey) -> Iterator[None]:
        """Count a request as waiting for a turn while its body runs.

        A turn whose answer reached no agent is cancelled, or withdrawn from the session: no agent
        has it, so none will continue it. With a key of its own, the request will be sent again.
        """
        turn.num_waiting += 1
        try:
            yield
        finally:
            turn.num_waiting -= 1
            if not (turn.num_waiting or turn.is_delivered or key.is_given):
                self._forget(session, turn)
                turn.task.cancel()
                if turn.task.done() and not (turn.task.cancelled() or turn.task.exception()):
                    session.conversation.withdraw(turn.task.result()[1])

    @staticmethod
    def _forget(session: AgentSession, turn: TurnRequest) -> None:
        for name in [name for name, each in session.requests.items() if each is turn]:
            del session.requests[name]

    def begin(
        self, session: AgentSession, request: ChatRequest
    ) -> asyncio.Task[tuple[ChatResponse, list[Turn]]]:
        """Start a turn; cancelling it aborts it at the instances.

        Raises:
            BadRequestError: The session is closed.
        """
        if session.is_closed:
            raise _closed(session)
        task = asyncio.get_running_loop().create_task(self._turn(session, request))
        session.began(task)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _turn(
        self, session: AgentSession, request: ChatRequest
    ) -> tuple[ChatResponse, list[Turn]]:
        if not 1 <= request.n <= _MOST_ANSWERS:
            raise BadRequestError(f"n is {request.n}; expected 1 to {_MOST_ANSWERS}", "n")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise BadRequestError(
                f"max_tokens is {request.max_tokens}; expected 1 or more", "max_tokens"
            )
        if request.tools and not self._template.shows_tools and not self._has_warned:
            self._has_warned = True
            log.warning(
                "agents send tools, but the model does not see them: its chat template "
                "does not show tools. Use one that does"
            )
        conversation = session.conversation
        try:
            # Templates and tokenizers take long for long chats; threads let other turns continue.
            prompt = await asyncio.to_thread(conversation.prepare, request)
            ids = prompt.ids()
            async with _reserved(session, request, len(ids), self._max_context) as most:
                params = msgspec.structs.replace(session.sampling, max_new_tokens=most)
                seeds = [session.next_seed() for _ in range(request.n)]
                results = await _all(
                    [
                        self._generate(
                            session, ids, request.stop, msgspec.structs.replace(params, seed=seed)
                        )
                        for seed in seeds
                    ]
                )
                found = await asyncio.to_thread(
                    lambda: [conversation.describe(prompt, each) for each in results]
                )
                turns, choices = [turn for turn, _ in found], [choice for _, choice in found]
                if not conversation.add(prompt, turns):
                    raise _closed(session)
        except EngineCallError as error:
            if error.remote_type != "ValueError":
                raise
            # The engine refuses the prompt, such as one that is longer than the model's positions.
            session.is_truncated = True
            raise BadRequestError(error.remote_message, code="context_length_exceeded") from error
        except asyncio.CancelledError:
            if session.is_closed:
                raise _closed(session) from None
            raise
        is_own = request.max_tokens is not None and most == request.max_tokens
        if not is_own and any(choice.finish == "length" for choice in choices):
            session.is_truncated = True
        answer = ChatResponse(
            id=uuid.uuid4().hex,
            created=int(time.time()),
            model=self.model,
            prompt_ids=array("i", ids),
            choices=choices,
        )
        return answer, turns

    async def _generate(
        self,
        session: AgentSession,
        ids: list[int],
        stops: Sequence[str],
        sampling: SamplingParams,
    ) -> GenerationResult:
        """Generate until the end; with stop texts in segments, without the tokens after one."""
        options = RequestOptions(session=session.id)
        if not any(stops):
            return await self._rollout.async_generate_one(ids, sampling, options)
        found: GenerationResult | None = None
        while True:
            num = 0 if found is None else len(found.token_ids)
            part = msgspec.structs.replace(
                sampling, max_new_tokens=min(sampling.max_new_tokens, num + _SEGMENT)
            )
            resumed = None if found is None else msgspec.structs.replace(found, stop_reason="abort")
            found = await self._rollout.async_generate_one(ids, part, options, resume_from=resumed)
            text = self._template.decode(found.token_ids)
            places = [text.find(each) + len(each) for each in stops if each and each in text]
            if places:
                num = self._template.split(found.token_ids, min(places))
                return msgspec.structs.replace(
                    found,
                    token_ids=found.token_ids[:num],
                    logprobs=found.logprobs[:num],
                    versions=found.versions[:num],
                    stop_reason="stop",
                )
            if found.stop_reason != "length" or len(found.token_ids) >= sampling.max_new_tokens:
                return found


@contextlib.asynccontextmanager
async def _reserved(
    session: AgentSession, request: ChatRequest, num_prompt: int, max_context: int | None
) -> AsyncIterator[int]:
    """Reserve the turns and tokens of a request; yield the maximum tokens of each of its answers.

    If turns in progress hold the turns or tokens that the request needs, it waits for them.

    Raises:
        BadRequestError: A limit is reached; the session is truncated.
    """
    limits, num = session.limits, request.n
    context = max_context if limits.max_context is None else limits.max_context
    wanted = session.sampling.max_new_tokens
    if request.max_tokens is not None:
        wanted = min(wanted, request.max_tokens)
    if context is not None:
        wanted = min(wanted, context - num_prompt)
    while True:
        turns, tokens = session.num_turns, session.conversation.num_sampled
        most, has_room = wanted, True
        if limits.max_turns is not None:
            has_room = turns + session.reserved_turns + num <= limits.max_turns
        if limits.max_tokens is not None:
            most = min(most, (limits.max_tokens - tokens) // num)
            has_room &= tokens + session.reserved_tokens + num * most <= limits.max_tokens
        if limits.max_turns is not None and turns + num > limits.max_turns:
            session.is_truncated = True
            raise BadRequestError(
                f"{turns} of the session's {limits.max_turns} turns are used, and {num} are "
                "requested",
                code="turn_limit_exceeded",
            )
        if most < 1:
            session.is_truncated = True
            raise BadRequestError(
                f"no tokens are left: the prompt has {num_prompt} tokens of at most {context}, "
                f"and {tokens} of at most {limits.max_tokens} were sampled in this session",
                code="context_length_exceeded",
            )
        if has_room:
            break
        await session.released.wait()
    session.reserved_turns += num
    session.reserved_tokens += num * most
    try:
        yield most
    finally:
        session.reserved_turns -= num
        session.reserved_tokens -= num * most
        session.released.set()
        session.released = asyncio.Event()


def _closed(session: AgentSession) -> BadRequestError:
    return BadRequestError(
        f"the session {session.name!r} is closed; open another one", code="session_closed"
    )


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all; the failure of one cancels the others."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
