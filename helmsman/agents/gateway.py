"""AgentGateway: HTTP server that gives unmodified agents access to the model in training."""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from helmsman import HelmsmanError, RolloutController, SamplingParams
from helmsman.agents._addresses import checked_public_url, is_all, node_address, url_of
from helmsman.agents._journal import Journal
from helmsman.agents._registry import Registry
from helmsman.agents._session import DIALECT_PATHS, AgentSession, SessionLimits, SessionRecord
from helmsman.agents._template import ChatTemplate
from helmsman.agents._turns import Turns
from helmsman.api.closing import Starting
from helmsman.api.extras import needed_by

T = TypeVar("T")


class AgentGateway(Starting):
    """Serves the APIs of OpenAI and Anthropic to agents, and records their sessions token by token.

        with AgentGateway(rollout, tokenizer) as gateway:
            async with gateway.session() as session:
                session.reward = await agent(base_url=session.base_url, api_key=session.key)
            samples = session.samples()

    The trainer's ``sampling`` decides temperature, top_p, top_k and seed, because the policy that
    samples must be the one that is trained; values of agents are ignored. Agents decide limits of
    tokens and stop texts. The response to a streaming request arrives as events once the turn is
    complete; until then it is kept open.

    Args:
        rollout: The instances that generate.
        tokenizer: A Hugging Face tokenizer with a chat template, or the folder of one.
        sampling: Sampling of all turns; ``max_new_tokens`` is the limit of a turn.
        model: Name of the model that agents see; any name is accepted in requests.
        host: Address to listen on; 0.0.0.0 for all of IPv4, :: for all of IPv6 and IPv4. Anyone who
            can reach it and has a session's key can use it.
        port: Port to listen on; 0 for a free one.
        public_url: URL by which all agents reach the gateway, such as that of a proxy, which
            removes its path. When None, outside agents are given the address by which they came,
            and others ``host``, or the node's address if the gateway listens on all.
        max_context: Maximum tokens of a prompt and its answer together; the tokenizer's
            ``model_max_length`` when None, if it has one.
        max_turns_in_flight: Further turns receive 429 with Retry-After.
        max_pending: Maximum sessions of outside agents that are open, or finished and not yet
            collected; further ones receive 429. With ``(1 + max_staleness) * batch_size``, no
            session is older than ``max_staleness`` versions when it is trained on.
        family: Form of the model's tool calls; recognised from the chat template when None.
        stop_token_ids: Further tokens that end a turn.
        key: Key by which outside agents open sessions; generated when None.
        outside_timeout: Seconds without a request after which an outside agent's session ends.
        journal: File in which finished sessions are kept until ``forget``; None keeps none.

    Raises:
        ValueError: The tokenizer has no chat template, the family is unknown, or ``public_url`` is
            invalid.
        BackendNotInstalledError: aiohttp or transformers is missing.
        OSError: The port is taken, the host is not this node's, or the journal cannot be read; from
            ``initialize``.
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
        public_url: str | None = None,
        max_context: int | None = None,
        max_turns_in_flight: int = 4096,
        max_pending: int | None = None,
        family: str | None = None,
        stop_token_ids: Sequence[int] = (),
        key: str | None = None,
        outside_timeout: float = 3600.0,
        journal: str | Path | None = None,
    ) -> None:
        self._public_url = "" if public_url is None else checked_public_url(public_url)
        if isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(tokenizer)
        self.template = ChatTemplate(tokenizer, family, stop_token_ids)
        """Chat template of the model."""
        longest = int(getattr(tokenizer, "model_max_length", 0) or 0)
        self._sampling = self._with_stops(sampling or SamplingParams(max_new_tokens=1024))
        self._turns = Turns(
            rollout,
            self.template,
            model,
            max_context or (longest if 0 < longest < 1 << 30 else None),
            max_turns_in_flight,
        )
        self._journal = None if journal is None else Journal(Path(journal))
        self._registry = Registry(
            lambda name, metadata, url: self._open(
                name, url=url, metadata=metadata, is_outside=True
            ),
            self._journal,
            key or f"sk-{secrets.token_urlsafe(24)}",
            max_pending,
            outside_timeout,
        )
        self._host, self._port = host.removeprefix("[").removesuffix("]"), port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="helmsman-gateway", daemon=True
        )
        self._lock = threading.Lock()
        self._stop: Callable[[], Awaitable[None]] | None = None
        self._is_closed = False

    @property
    def is_started(self) -> bool:
        """Whether ``initialize`` has succeeded; stays True after ``close``."""
        return self._stop is not None

    @property
    def url(self) -> str:
        """URL of the server from ``initialize`` on, such as ``http://127.0.0.1:41234``."""
        return self._public_url or url_of(self._host, self._port)

    @property
    def key(self) -> str:
        """Key by which outside agents open sessions."""
        return self._registry.key

    @property
    def model(self) -> str:
        """Name of the model that agents see."""
        return self._turns.model

    @property
    def is_full(self) -> bool:
        """Whether a further turn must wait."""
        return self._turns.is_full

    def initialize(self) -> None:
        """Start the server in a thread of its own. Idempotent."""
        with self._lock:
            if self._is_closed:
                raise HelmsmanError("the gateway is closed; make a new one")
            if self.is_started:
                return
            with needed_by("AgentGateway", "aiohttp"):
                from helmsman.agents._server import serve
            if not self._thread.is_alive():
                self._thread.start()
            self._stop, bound, self._port = asyncio.run_coroutine_threadsafe(
                serve(self._registry, self._turns, self._host, self._port, self._public_url),
                self._loop,
            ).result()
            if is_all(bound):
                self._host = node_address(bound)

    def close(self) -> None:
        """End the server and all sessions. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._registry.close()
            if self._thread.is_alive():
                self._on_loop(self._end()).result()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
            self._loop.close()
            if self._journal is not None:
                self._journal.close()

    async def _end(self) -> None:
        await self._registry.announce()
        await self._turns.wait_ended()
        if self._stop is not None:
            await self._stop()

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

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

        Raises:
            ValueError: An open session has this name.
            BadRequestError: The name has a lone surrogate.
            HelmsmanError: The gateway is closed.
        """
        self.initialize()
        return self._open(
            name,
            limits=limits,
            seed=seed,
            sampling=None if sampling is None else self._with_stops(sampling),
            metadata=metadata,
            is_kept=is_kept,
        )

    def _open(
        self,
        name: str | None,
        *,
        url: str = "",
        sampling: SamplingParams | None = None,
        **given: Any,
    ) -> AgentSession:
        session = AgentSession(
            self.template,
            url or self.url,
            self._end_session,
            self._complete,
            name=name,
            sampling=sampling or self._sampling,
            **given,
        )
        self._registry.add(session)
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

        The journal, if there is one, still has them: a restarted script collects them again, unless
        it has called ``forget``.

        Args:
            num_sessions: The number to wait for.

        Raises:
            HelmsmanError: The gateway is closed.
        """
        self.initialize()
        registry = self._registry
        registry.outside.name = self.url
        with registry.outside.waiting("collect", num_sessions, registry.ready):
            while True:
                await asyncio.wrap_future(self._on_loop(registry.collect(num_sessions)))
                # Taken here, so that a wait that is cancelled takes none.
                if (found := registry.take(num_sessions)) is not None:
                    return found

    async def _complete(self, session: AgentSession, body: dict[str, Any]) -> dict[str, Any]:
        """Take a turn on the gateway's loop, for ``AgentSession.complete``."""
        dialect = session.dialect(DIALECT_PATHS[0])

        async def turn() -> dict[str, Any]:
            answer, _ = await self._turns.begin(session, dialect.read(body))
            message: dict[str, Any] = dialect.write(answer, body)["choices"][0]["message"]
            return message

        if self._is_closed:
            raise HelmsmanError("the gateway is closed; make a new one")
        return await asyncio.wrap_future(self._on_loop(turn()))

    def _end_session(self, session: AgentSession, is_complete: bool) -> None:
        def abort() -> None:
            for task in session.running:
                task.cancel()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(abort)
        try:
            self._registry.end(session, is_complete)
        finally:
            if session.is_outside and not self._is_closed:
                self._on_loop(self._registry.announce())

    def _with_stops(self, sampling: SamplingParams) -> SamplingParams:
        ids = tuple(sorted({*sampling.stop_token_ids, *self.template.stop_ids}))
        return msgspec.structs.replace(sampling, stop_token_ids=ids)


def load_tokenizer(folder: str | Path) -> Any:
    """Load the tokenizer of a local Hugging Face folder.

    Raises:
        BackendNotInstalledError: transformers is missing.
        OSError: There is no tokenizer.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(
            f"there is no folder {str(folder)!r}; expected a local Hugging Face folder"
        )
    with needed_by("the tokenizer of a model folder", "transformers"):
        from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
