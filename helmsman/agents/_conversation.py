"""The turns of a session as a tree of tokens, and the training samples made of them."""

from __future__ import annotations

import array
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from helmsman.agents._messages import BadRequestError, ChatRequest, Choice, Digest, Message
from helmsman.agents._template import ChatTemplate, Rendered, Sampled
from helmsman.agents.samples import Sample
from helmsman.api.generation import GenerationResult


class Turn:
    """A turn of the model: its prompt from the end of an earlier turn, and its sampled tokens."""

    __slots__ = (
        "body", "budget_hit", "digest", "message", "new_ids", "num_before", "parent", "prompt",
        "reasoning", "result", "reward", "stop_text",
    )  # fmt: skip

    def __init__(self, prompt: Prompt, parent: Turn | None, result: GenerationResult) -> None:
        self.parent = parent
        self.new_ids = array.array("i", prompt.new_ids)
        """Tokens of the prompt after the parent's."""
        self.num_before = 0 if parent is None else parent.num_tokens
        self.result = _Tokens.of(result)
        self.prompt, self.reward = prompt.rendered, 0.0
        self.message = Message(role="assistant")
        self.stop_text, self.digest, self.budget_hit = "", b"", result.stop_reason == "length"
        self.reasoning = self.body = (0, 0)

    @property
    def num_tokens(self) -> int:
        """Number of tokens from the start of its branch to its end."""
        return self.num_before + len(self.new_ids) + len(self.result.ids)

    def line(self) -> list[Turn]:
        """Return its branch: the turns from the first to this one."""
        found: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            found.append(turn)
            turn = turn.parent
        return found[::-1]

    def ids(self) -> list[int]:
        """Return all tokens from the start of its branch to its end."""
        return [
            id_ for turn in self.line() for part in (turn.new_ids, turn.result.ids) for id_ in part
        ]

    def sampled(self) -> Sampled:
        """Return the turn in the form that the chat template takes."""
        ids = self.result.ids
        return Sampled(
            self.message,
            ids,
            self.stop_text,
            ids[slice(*self.reasoning)],
            ids[slice(*self.body)],
        )


class _Tokens(NamedTuple):
    """Sampled tokens in little memory."""

    ids: array.array[int]
    logprobs: array.array[float]
    versions: array.array[int]

    @classmethod
    def of(cls, result: GenerationResult) -> _Tokens:
        return cls(
            array.array("i", result.token_ids),
            array.array("d", result.logprobs),
            array.array("i", result.versions),
        )


class Prompt(NamedTuple):
    """The prompt of a turn."""

    request: ChatRequest
    parent: Turn | None
    """The turn whose tokens it continues."""
    new_ids: list[int]
    """Its tokens after the parent's."""
    rendered: Rendered
    digest: Digest
    """Digest of the chat in the prompt."""
    fork: str = ""
    """Why the session forks here; '' if it does not."""

    def ids(self) -> list[int]:
        """Return all its tokens."""
        return (self.parent.ids() if self.parent else []) + self.new_ids


class Conversation:
    """The turns of a session. Its methods may be called from any thread.

    A prompt that continues an earlier turn consists of the tokens of that turn's prompt, the
    tokens sampled in it, and the tokens of the new messages. Other prompts start a branch.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template, self._lock = template, threading.Lock()
        self.turns: list[Turn] = []
        self.forks: list[str] = []
        """Reasons of prompts that did not continue an earlier turn."""
        self.is_closed = False
        self._by_digest: dict[bytes, Turn] = {}

    def prepare(self, request: ChatRequest) -> Prompt:
        """Return the prompt of a turn.

        Raises:
            BadRequestError: The chat is empty, ends with the model's message, or is rejected by
                the chat template.
        """
        messages = list(request.messages)
        if not messages:
            raise BadRequestError("the chat has no messages; expected at least one", "messages")
        if messages[-1].role == "assistant":
            raise BadRequestError(
                "the last message is the assistant's, and continuing it is not supported. Send a "
                "user message or a tool result last",
                "messages",
            )
        tools, args = request.tools, request.template_args
        digest = Digest(tools, args)
        own: dict[int, Turn] = {}
        for index, message in enumerate(messages):
            turn = self._by_digest.get(digest.add(message))
            if turn is not None:
                own[index] = turn
                # Agents omit parts of the model's message, such as reasoning.
                messages[index] = turn.message
        text = self._template.render(messages, tools, args)
        rendered = Rendered.of(text)
        if not own:
            reason = "no earlier turn is part of this chat" if self.turns else ""
            return Prompt(request, None, self._template.encode(text), rendered, digest, reason)
        last = max(own)
        turn = own[last]
        suffix = self._template.suffix(
            messages[:last], turn.sampled(), messages[last + 1 :], turn.prompt, tools, args
        )
        if suffix.rewrite:
            ids = self._template.rewritten(
                messages, {index: each.sampled() for index, each in own.items()}, tools, args
            )
            return Prompt(request, None, ids, rendered, digest, suffix.rewrite)
        ids = self._template.encode_after(turn.stop_text, suffix.text)
        return Prompt(request, turn, ids, rendered, digest)

    def describe(self, prompt: Prompt, result: GenerationResult) -> tuple[Turn, Choice]:
        """Return the turn that was sampled for a prompt, and the answer for the agent."""
        turn = Turn(prompt, prompt.parent, result)
        return turn, self._describe(turn, prompt, result)

    def add(self, prompt: Prompt, turns: Sequence[Turn]) -> bool:
        """Record the turns of a prompt; return False if the session is closed."""
        with self._lock:
            if self.is_closed:
                return False
            if prompt.fork:
                self.forks.append(prompt.fork)
            for turn in turns:
                self.turns.append(turn)
                self._by_digest[turn.digest] = turn
        return True

    def close(self) -> bool:
        """Refuse further turns; return False if that was done before."""
        with self._lock:
            was_closed, self.is_closed = self.is_closed, True
        return not was_closed

    def withdraw(self, turns: Sequence[Turn]) -> None:
        """Remove turns whose answer never reached the agent."""
        with self._lock:
            gone = set(map(id, turns))
            self.turns = [each for each in self.turns if id(each) not in gone]
            for each in turns:
                if self._by_digest.get(each.digest) is each:
                    del self._by_digest[each.digest]

    def _describe(self, turn: Turn, prompt: Prompt, result: GenerationResult) -> Choice:
        """Fill in the message of a turn, and return the answer for the agent."""
        template, request = self._template, prompt.request
        ids = result.token_ids
        turn.stop_text = "" if result.stop_reason == "length" else template.stop_text(ids)
        num_own = len(ids) - bool(turn.stop_text)
        text = template.decode(ids[:num_own])
        found = [each for each in request.stop if each and each in text]
        stop = min(found, key=text.find, default=None)
        cut = text.find(stop) if stop is not None else len(text)
        parsed = template.format.parse(
            text[:cut],
            prompt.rendered.end,
            request.tools,
            has_tools=bool(request.tools) and request.parse_tools,
        )
        begin, end = parsed.reasoning_span
        turn.reasoning = (
            (template.split(ids, begin), template.split(ids, end)) if end > begin else (0, 0)
        )
        turn.body = (template.split(ids, parsed.body) if parsed.body else 0, num_own)
        turn.message = Message(
            role="assistant",
            content=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
        )
        turn.digest = prompt.digest.then(turn.message)
        is_cut = result.stop_reason == "length" and stop is None
        turn.budget_hit = is_cut
        return Choice(
            message=turn.message,
            finish="length" if is_cut else "tool_calls" if parsed.tool_calls else "stop",
            stop_text=stop,
            token_ids=ids,
            logprobs=result.logprobs,
            texts=[template.decode([id_]) for id_ in ids] if request.logprobs else [],
        )

    def samples(self, session_id: str, reward: float) -> list[Sample]:
        """Return one sample per branch, in the order of their last turns."""
        with self._lock:
            turns = list(self.turns)
        continued = {id(turn.parent) for turn in turns}
        used: set[int] = set()
        return [
            _sample(leaf.line(), used, session_id, reward)
            for leaf in turns
            if id(leaf) not in continued
        ]

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        with self._lock:
            return sum(len(turn.result.ids) for turn in self.turns)


def _sample(line: Sequence[Turn], used: set[int], session_id: str, reward: float) -> Sample:
    """Make the sample of a branch; ``used`` has the turns that are in an earlier sample."""
    made: dict[str, list[Any]] = {
        name: [] for name in ("input_ids", "loss_mask", "logprobs", "versions")
    }
    ends: list[int] = []
    for turn in line:
        tokens, num_new = turn.result, len(turn.new_ids)
        made["input_ids"] += [*turn.new_ids, *tokens.ids]
        made["loss_mask"] += [0] * num_new + [int(id(turn) not in used)] * len(tokens.ids)
        made["logprobs"] += [0.0] * num_new + list(tokens.logprobs)
        made["versions"] += [-1] * num_new + list(tokens.versions)
        ends.append(len(made["input_ids"]))
        used.add(id(turn))
    return Sample(
        **made,
        turn_ends=ends,
        turn_rewards=[turn.reward for turn in line],
        reward=reward,
        session_id=session_id,
        is_truncated=line[-1].budget_hit,
    )
