"""A session: one agent's conversation with the model, with its key, limits and reward."""

from __future__ import annotations

import asyncio
import collections
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random
from typing import Any

import msgspec

from helmsman import SamplingParams
from helmsman.agents._conversation import Conversation
from helmsman.agents._dialects.anthropic import AnthropicMessages
from helmsman.agents._dialects.base import Dialect
from helmsman.agents._dialects.chat import ChatCompletions
from helmsman.agents._dialects.responses import Responses
from helmsman.agents._template import ChatTemplate
from helmsman.agents.samples import Sample
from helmsman.api.plain import finite


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a session."""

    max_tokens: int | None = None
    """Maximum tokens that the model samples in the session; None for no limit."""
    max_context: int | None = None
    """Maximum tokens of a prompt and its answer together; None for the gateway's."""
    max_turns: int | None = None
    """Maximum turns of the model; None for no limit."""
    truncated_reward: float | None = None
    """Reward of a session that reached a limit, in place of its own; None keeps its own. Rewards of
    turns are added to it."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A finished session."""

    name: str
    """Given by the caller; the session's id if none was given."""
    session_id: str
    reward: float
    """The session's own reward and those of its turns together."""
    samples: list[Sample]
    is_truncated: bool = False
    num_turns: int = 0
    metadata: dict[str, Any] = {}
    """Given by the caller, and returned unchanged."""
    forks: dict[str, int] = {}
    """Number of forks by reason."""
    seconds: float = 0.0
    """From its start to its end."""
    model_seconds: float = 0.0
    """Seconds in which turns of the model were in progress; tools and the agent take the rest."""
    is_outside: bool = False
    """Whether an outside agent opened the session, by HTTP."""


class AgentSession:
    """One agent's conversation with the model. Made by ``AgentGateway.session``.

    Use it as a context manager, sync or async. Its end closes the session: its key is void and its
    requests are aborted.
    """

    def __init__(
        self,
        template: ChatTemplate,
        url: str,
        on_end: Callable[[AgentSession, bool], None],
        complete: Callable[[AgentSession, dict[str, Any]], Awaitable[dict[str, Any]]],
        *,
        name: str | None,
        sampling: SamplingParams,
        limits: SessionLimits | None = None,
        seed: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        is_kept: bool = True,
        is_outside: bool = False,
    ) -> None:
        self.id = secrets.token_hex(8)
        self.key = f"sk-{secrets.token_urlsafe(24)}"
        """Key of the session's API, for ``api_key``."""
        self.base_url = f"{url}/sessions/{self.id}/v1"
        """URL of the session's API, for ``base_url``."""
        self.name = self.id if name is None else name
        self.limits, self.seed = limits or SessionLimits(), seed
        self.metadata = dict(metadata or {})
        self.sampling, self.is_kept, self.is_outside = sampling, is_kept, is_outside
        self.conversation = Conversation(template)
        self._reward = 0.0
        self.is_rated = False
        """Whether the session or one of its turns was given a reward."""
        self.is_truncated = False
        """Whether a limit was reached."""
        self._responses: Responses | None = None
        self._on_end, self._complete = on_end, complete
        self.requests: collections.OrderedDict[str, Any] = collections.OrderedDict()
        """Turns by the key of their request, for requests that are sent again."""
        self.running: set[asyncio.Task[Any]] = set()
        """Turns in progress."""
        self.reserved_turns = self.reserved_tokens = 0
        """Turns and tokens of turns in progress, which count against the limits."""
        self.released = asyncio.Event()
        """Set, and replaced, when a reservation ends."""
        self._begun = self._busy_since = self.last_used = time.monotonic()
        self._model_seconds = 0.0
        self._numbers = itertools.count()

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which the vendors' SDKs find the session."""
        root = self.base_url.removesuffix("/v1")
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": self.key,
            "HELMSMAN_SESSION_URL": root,
        }

    @property
    def reward(self) -> float:
        """Reward of the session, in addition to those of its turns; a finite number."""
        return self._reward

    @reward.setter
    def reward(self, reward: float) -> None:
        self._reward, self.is_rated = _finite(reward), True

    @property
    def is_closed(self) -> bool:
        """Whether the session has ended."""
        return self.conversation.is_closed

    @property
    def forks(self) -> list[str]:
        """Reasons of prompts that did not continue an earlier turn."""
        return list(self.conversation.forks)

    @property
    def num_turns(self) -> int:
        """Number of turns of the model."""
        return len(self.conversation.turns)

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], **fields: Any
    ) -> dict[str, Any]:
        """Generate a turn of the model, without HTTP; works on any event loop.

        Args:
            messages: The chat, in the form of Chat Completions.
            **fields: Other fields of Chat Completions, such as ``tools`` and ``max_tokens``.

        Returns:
            The model's message, in the same form.

        Raises:
            BadRequestError: The request is invalid, or a limit is reached.
            HelmsmanError: The model is not available.
        """
        return await self._complete(self, {"messages": list(messages), **fields})

    def set_turn_reward(self, turn: int, reward: float) -> None:
        """Set the reward of one turn of the model.

        Args:
            turn: Its number, from 0; negative numbers count from the last.
            reward: The reward.

        Raises:
            IndexError: There is no such turn.
            ValueError: The reward is not a finite number.
        """
        self.conversation.turns[turn].reward, self.is_rated = _finite(reward), True

    def samples(self) -> list[Sample]:
        """Return one training sample per branch; see Sample."""
        truncated = self.limits.truncated_reward if self.is_truncated else None
        return self.conversation.samples(self.id, self.reward if truncated is None else truncated)

    def record(self) -> SessionRecord:
        """Return the session with its samples."""
        samples, of_turns = self.samples(), [turn.reward for turn in self.conversation.turns]
        return SessionRecord(
            name=self.name,
            session_id=self.id,
            reward=(samples[0].reward if samples else self.reward) + sum(of_turns),
            samples=samples,
            is_truncated=self.is_truncated,
            num_turns=self.num_turns,
            metadata=self.metadata,
            forks=dict(collections.Counter(self.forks)),
            seconds=time.monotonic() - self._begun,
            model_seconds=self._model_seconds,
            is_outside=self.is_outside,
        )

    def close(self, *, is_complete: bool = True) -> None:
        """Close the session. Idempotent.

        Args:
            is_complete: Whether it counts as finished, and is persisted.
        """
        if self.conversation.close():
            self._on_end(self, is_complete)

    def __enter__(self) -> AgentSession:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(is_complete=kind is None)

    async def __aenter__(self) -> AgentSession:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        self.close(is_complete=kind is None)

    def dialect(self, path: str) -> Dialect:
        """Return the dialect of an API's path."""
        if path == Responses.path:
            self._responses = self._responses or Responses()
            return self._responses
        return DIALECTS[path]

    def next_seed(self) -> int | None:
        """Return the seed of the next turn; None if the session has none."""
        number = next(self._numbers)
        return None if self.seed is None else Random(f"{self.seed}/{number}").getrandbits(63)

    def began(self, task: asyncio.Task[Any]) -> None:
        """Add a turn in progress."""
        self.last_used = time.monotonic()
        if not self.running:
            self._busy_since = self.last_used
        self.running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.last_used = time.monotonic()
        self.running.discard(task)
        if not self.running:
            self._model_seconds += self.last_used - self._busy_since


def _finite(reward: Any) -> float:
    if (number := finite(reward)) is not None:
        return number
    raise ValueError(f"the reward is {reward!r:.80}; expected a finite number")


DIALECTS: dict[str, Dialect] = {
    each.path: each for each in (ChatCompletions(), AnthropicMessages())
}
DIALECT_PATHS = (*DIALECTS, Responses.path)
"""Paths of the APIs below a session's ``/v1``."""
