"""AgentGateway: an HTTP server through which unchanged agents use the model that is trained."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from helmsman import (
    GenerationResult,
    HelmsmanError,
    RequestOptions,
    RolloutController,
    SamplingParams,
)
from helmsman.agents._conversation import Prompt, Turn
from helmsman.agents._journal import Journal
from helmsman.agents._messages import Answer, BadRequestError, ChatRequest, Choice
from helmsman.agents._session import DIALECT_PATHS, AgentSession, SessionLimits, SessionRecord
from helmsman.agents._template import ChatTemplate
from helmsman.api.closing import Starting
from helmsman.api.extras import needed_by

log = logging.getLogger(__name__)

_MOST_ANSWERS = 128
_SEGMENT = 64
"""Tokens between two looks for stop texts, which only the gateway knows."""


class AgentGateway(Starting):
    """Serves the APIs of OpenAI and Anthropic to agents, and records their sessions token by token.

        with AgentGateway(rollout, tokenizer) as gateway:
            async with gateway.session() as session:
                session.reward = await agent(base_url=session.base_url, api_key=session.key)
            samples = session.samples()

    The trainer's ``sampling`` decides temperature, top_p, top_k and seed, because the sampled policy
    must be the trained one; values of agents are ignored. Agents decide limits of tokens and stop
    texts. The response to a streaming request arrives as events once the turn is complete; until
    then it is kept open.

    Args:
        rollout: The instances that generate.
        tokenizer: A Hugging Face tokenizer with a chat template, or the folder of one.
        sampling: Sampling of all turns; ``max_new_tokens`` is the limit of a turn.
        model: Name of the model that agents see; any name is accepted in requests.
        host: Address to listen on. Anyone who can reach it and has a session's key can use it.
        port: Port to listen on; 0 for a free one.
        max_context: Most tokens of a prompt and its answer together; the tokenizer's
            ``model_max_length`` when None, if it has one.
        max_turns_in_flight: Further turns receive 429 with Retry-After.
        max_pending: Most sessions of outside agents that are open, or finished and not yet
            collected; further ones receive 429. With ``(1 + max_staleness) * batch_size``, no
            session is older than ``max_staleness`` versions when it is trained on.
        family: Form of the model's tool calls; recognised from the chat template when None.
        stop_token_ids: Further tokens that end a turn.
        journal: File in which finished sessions are kept; None keeps none.

    Raises:
        ValueError: The tokenizer has no chat template, or the family is unknown.
        BackendNotInstalledError: aiohttp or transformers is missing.
        OSError: The port is taken, or the journal cannot be read; from ``initialize``.
    """

    def __init__(
        self,
        rollout: RolloutController,
        tokenizer: Any,
        *,
        sampling: SamplingParams | None = None,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        max_context: int | None = None,
        max_turns_in_flight: int = 4096,
        max_pending: int | None = None,
        family: str | None = None,
        stop_token_ids: Sequence[int] = (),
        journal: str | Path | None = None,
    ) -> None:
        if isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(tokenizer)
        self.template = ChatTemplate(tokenizer, family, stop_token_ids)
        """Chat template of the model."""
        self.key = f"sk-{uuid.uuid4().hex}"
        """Key by which outside agents open sessions."""
        self._rollout, self._model = rollout, model
        self._sampling = self._with_stops(sampling or SamplingParams(max_new_tokens=1024))
        longest = int(getattr(tokenizer, "model_max_length", 0) or 0)
        self._max_context = max_context or (longest if 0 < longest < 1 << 30 else None)
        self._max_turns, self._max_pending = max_turns_in_flight, max_pending
        self._host, self._port = host, port
        self._journal = None if journal is None else Journal(Path(journal))
        self._sessions: dict[str, AgentSession] = {}
        self._by_key: dict[bytes, AgentSession] = {}
        self._turns: dict[str, set[asyncio.Task[Any]]] = {}
        """Turns in progress, by session."""
        self._num_turns = 0
        self._outside: set[str] = set()
        """Open sessions of outside agents."""
        self._finished: asyncio.Queue[SessionRecord] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], Awaitable[None]] | None = None
        self._is_closed = False

    # --- start and end ----------------------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        """Whether ``initialize`` has succeeded; stays True after ``close``."""
        return self._stop is not None

    @property
    def url(self) -> str:
        """URL of the server, such as ``http://127.0.0.1:41234``."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def initialize(self) -> None:
        """Start the server in a thread of its own. Idempotent."""
        if self.is_started:
            return
        if self._is_closed:
            raise HelmsmanError("the gateway is closed; make a new one")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="helmsman-gateway", daemon=True)
        self._thread.start()
        try:
            self._stop = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()
        except BaseException:
            self._end_loop()
            raise

    def _run_loop(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _serve(self) -> Callable[[], Awaitable[None]]:
        from helmsman.agents._server import serve

        stop, self._port = await serve(self, self._host, self._port)
        return stop

    def close(self) -> None:
        """End the server and all sessions. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for session in list(self._sessions.values()):
            session.close(is_complete=False)
        if self._loop is not None and self._stop is not None:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()  # type: ignore[arg-type]
            self._end_loop()
        if self._journal is not None:
            self._journal.close()

    def _end_loop(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    # --- sessions ---------------------------------------------------------------------------------

    def session(
        self,
        name: str | None = None,
        *,
        limits: SessionLimits | None = None,
        seed: int | None = None,
        sampling: SamplingParams | None = None,
        metadata: Mapping[str, Any] | None = None,
        is_kept: bool = True,
    ) -> AgentSession:
        """Open a session.

        Args:
            name: Name in the journal, unique in the run; the session's id when None.
            limits: Limits of tokens and turns.
            seed: Seed of all sampling in the session; None draws one per turn.
            sampling: Sampling of its turns; the gateway's when None. Its seed is not used.
            metadata: Returned with the finished session.
            is_kept: Whether the journal, if there is one, keeps the session once it is finished.

        Returns:
            The session, to be used as a context manager.
        """
        self.initialize()
        session = AgentSession(
            self.template,
            self.url,
            self._end_session,
            self._complete,
            name=name,
            limits=limits or SessionLimits(),
            seed=seed,
            sampling=self._sampling if sampling is None else self._with_stops(sampling),
            metadata=metadata or {},
            is_kept=is_kept,
        )
        self._sessions[session.id] = session
        self._by_key[_digest(session.key)] = session
        return session

    def finished(self, name: str) -> SessionRecord | None:
        """Return the finished session of a name from the journal, also of an earlier process.

        Args:
            name: Name that was given to ``session``.
        """
        return None if self._journal is None else self._journal.get(name)

    def forget(self, names: Sequence[str]) -> None:
        """Remove finished sessions from the journal, because they were trained on.

        Args:
            names: Names of the sessions.
        """
        if self._journal is not None:
            self._journal.forget(names)

    async def collect(self, num_sessions: int) -> list[SessionRecord]:
        """Return finished sessions of outside agents, in the order of their ends.

        Args:
            num_sessions: The number to wait for.
        """
        assert self._loop is not None, "the gateway is not started"

        async def wait() -> list[SessionRecord]:
            return [await self._finished.get() for _ in range(num_sessions)]

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(wait(), self._loop))

    async def _complete(self, session: AgentSession, body: dict[str, Any]) -> dict[str, Any]:
        """Take a turn on the gateway's loop, for ``AgentSession.complete``."""

        async def turn() -> dict[str, Any]:
            if session.is_closed:
                raise HelmsmanError(f"the session {session.name!r} is closed; open another one")
            dialect = session.dialect(DIALECT_PATHS[0])
            prompt, samplings = self.prepare(session, dialect.read(body))
            answer, _ = await self.begin(session, prompt, samplings, uuid.uuid4().hex)
            message: dict[str, Any] = dialect.write(answer, body)["choices"][0]["message"]
            return message

        assert self._loop is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(turn(), self._loop))

    def _end_session(self, session: AgentSession, is_complete: bool) -> None:
        self._sessions.pop(session.id, None)
        self._by_key.pop(_digest(session.key), None)
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all turns with it
                loop.call_soon_threadsafe(self._abort_turns, session.id)
        is_outside = session.id in self._outside
        self._outside.discard(session.id)
        journal = self._journal if session.is_kept else None
        if is_complete and (is_outside or journal is not None):
            record = session.record()
            if journal is not None:
                journal.add(record)
            if is_outside and loop is not None:
                loop.call_soon_threadsafe(self._finished.put_nowait, record)

    def _abort_turns(self, session_id: str) -> None:
        for task in self._turns.pop(session_id, ()):
            task.cancel()

    # --- for the server ---------------------------------------------------------------------------

    def find(self, session_id: str | None, key: str) -> AgentSession | None:
        """Return the session that a key opens.

        Args:
            session_id: Id in the request's path; None to look it up by its key.
            key: Key of the request.
        """
        session = self._by_key.get(_digest(key))
        return session if session is not None and session_id in (None, session.id) else None

    def opens_sessions(self, key: str) -> bool:
        """Whether a key is the gateway's."""
        return hmac.compare_digest(key.encode(), self.key.encode())

    def open_outside(self, name: str | None, metadata: Mapping[str, Any]) -> AgentSession | None:
        """Open a session for an outside agent; return None if it must wait.

        Args:
            name: Name in the journal.
            metadata: Returned with the finished session.
        """
        num_pending = len(self._outside) + self._finished.qsize()
        if self._max_pending is not None and num_pending >= self._max_pending:
            return None
        session = self.session(name, metadata=metadata)
        self._outside.add(session.id)
        return session

    @property
    def is_full(self) -> bool:
        """Whether a further turn must wait."""
        return self._num_turns >= self._max_turns

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._model

    def prepare(
        self, session: AgentSession, request: ChatRequest
    ) -> tuple[Prompt, list[SamplingParams]]:
        """Return the prompt of a turn, and the sampling of each of its answers.

        Raises:
            BadRequestError: The request is invalid, or a limit is reached.
        """
        if not 1 <= request.n <= _MOST_ANSWERS:
            raise BadRequestError(f"n is {request.n}; expected 1 to {_MOST_ANSWERS}", "n")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise BadRequestError(
                f"max_tokens is {request.max_tokens}; expected 1 or more", "max_tokens"
            )
        prompt = session.conversation.prepare(request)
        longest = session.sampling.max_new_tokens
        wanted = min(request.max_tokens or longest, longest)
        most = session.allowance(prompt.num_tokens, wanted, self._max_context)
        return prompt, [
            msgspec.structs.replace(session.sampling, max_new_tokens=most, seed=session.next_seed())
            for _ in range(request.n)
        ]

    def begin(
        self,
        session: AgentSession,
        prompt: Prompt,
        samplings: Sequence[SamplingParams],
        key: str,
    ) -> asyncio.Task[tuple[Answer, list[Turn]]]:
        """Start a turn; cancelling it aborts it at the instances.

        Args:
            session: The session.
            prompt: Of ``prepare``.
            samplings: Of ``prepare``.
            key: Identifies the request, in case that it is sent again.
        """
        task = asyncio.get_running_loop().create_task(self._turn(session, prompt, samplings, key))
        running = self._turns.setdefault(session.id, set())
        running.add(task)

        def ended(task: asyncio.Task[Any]) -> None:
            running.discard(task)
            if not running:
                self._turns.pop(session.id, None)

        task.add_done_callback(ended)
        return task

    async def _turn(
        self,
        session: AgentSession,
        prompt: Prompt,
        samplings: Sequence[SamplingParams],
        key: str,
    ) -> tuple[Answer, list[Turn]]:
        ids, request = prompt.ids(), prompt.request
        started = time.monotonic()
        self._num_turns += 1
        try:
            results = await asyncio.gather(
                *(self._generate(session, ids, request, each) for each in samplings)
            )
        finally:
            self._num_turns -= 1
            session.took(time.monotonic() - started)
        turns, choices = session.conversation.add(prompt, results)
        if any(choice.finish == "length" for choice in choices):
            session.is_truncated = session.is_truncated or self._is_at_limit(session, ids, choices)
        answer = Answer(
            id=uuid.uuid4().hex,
            created=int(time.time()),
            model=self._model,
            prompt_ids=ids,
            choices=choices,
        )
        session.remember(key, answer, turns)
        return answer, turns

    async def _generate(
        self,
        session: AgentSession,
        ids: list[int],
        request: ChatRequest,
        sampling: SamplingParams,
    ) -> GenerationResult:
        options = RequestOptions(session=session.id)
        if not request.stop:
            return await self._rollout.async_generate_one(ids, sampling, options)
        return await self._generate_until(request.stop, ids, sampling, options)

    async def _generate_until(
        self,
        stops: Sequence[str],
        ids: list[int],
        sampling: SamplingParams,
        options: RequestOptions,
    ) -> GenerationResult:
        """Generate in segments, until a stop text appears; drop the tokens after it."""
        found: GenerationResult | None = None
        while True:
            num = 0 if found is None else len(found.token_ids)
            part = msgspec.structs.replace(
                sampling, max_new_tokens=min(sampling.max_new_tokens, num + _SEGMENT)
            )
            resumed = None if found is None else msgspec.structs.replace(found, stop_reason="abort")
            found = await self._rollout.async_generate_one(ids, part, options, resume_from=resumed)
            text = self.template.decode(found.token_ids)
            places = [text.find(each) + len(each) for each in stops if each and each in text]
            if places:
                num = self.template.split(found.token_ids, min(places))
                return msgspec.structs.replace(
                    found,
                    token_ids=found.token_ids[:num],
                    logprobs=found.logprobs[:num],
                    versions=found.versions[:num],
                    stop_reason="stop",
                )
            if found.stop_reason != "length" or len(found.token_ids) >= sampling.max_new_tokens:
                return found

    def _with_stops(self, sampling: SamplingParams) -> SamplingParams:
        ids = tuple(sorted({*sampling.stop_token_ids, *self.template.stop_ids}))
        return msgspec.structs.replace(sampling, stop_token_ids=ids)

    def _is_at_limit(
        self, session: AgentSession, ids: Sequence[int], choices: Sequence[Choice]
    ) -> bool:
        """Whether a turn was cut off by a limit of its session, not by the agent's own."""
        limits = session.limits
        context = self._max_context if limits.max_context is None else limits.max_context
        longest = max(len(choice.token_ids) for choice in choices)
        return (
            longest >= session.sampling.max_new_tokens
            or (context is not None and len(ids) + longest >= context)
            or (
                limits.max_tokens is not None
                and session.conversation.num_sampled >= limits.max_tokens
            )
        )


def load_tokenizer(folder: str | Path) -> Any:
    """Load the tokenizer of a local Hugging Face folder.

    Raises:
        BackendNotInstalledError: transformers is missing.
        OSError: There is no tokenizer.
    """
    with needed_by("the tokenizer of a model folder", "transformers"):
        from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
