"""Answers to prompts: single ones that rewards score, or sessions of an agent."""

from __future__ import annotations

import asyncio
import inspect
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from helmsman import GenerationResult, RolloutController, SamplingParams
from helmsman.agents import AgentGateway, AgentSession, Sample, SessionLimits, SessionRecord
from helmsman.agents.programs import run_program
from helmsman.api.forms import run_in_new_thread
from helmsman.api.plain import finite
from helmsman.recipes.prompts import Draw, Row
from helmsman.recipes.rewards import find_function
from helmsman.recipes.scorer import Completion, Scored, Scorer
from helmsman.recipes.settings import AGENT_REWARD, Agent
from helmsman.recipes.tokens import FolderTokenizer

Outcome = tuple[list[Sample], Scored]
"""The samples of an answer, and its rewards."""


class Answers:
    """Answers prompts with the current weights.

    This base has no instances, and refuses to answer: a run with recorded rollouts uses it.
    """

    async def answer(
        self, row: Row, samplings: Sequence[SamplingParams], draw: Draw | None = None
    ) -> list[Outcome]:
        """Answer a prompt once per sampling.

        Args:
            row: The row of the prompt.
            samplings: One for each answer.
            draw: The draw in training; None in an evaluation.
        """
        raise AssertionError("a run with recorded rollouts generates nothing")

    def begin(self, step: int) -> None:
        """Begin at a step, after a start, a restart or a recovery."""

    def set_step(self, step: int) -> None:
        """Set the training step of later answers."""

    def forget(self, draws: Sequence[Draw]) -> None:
        """Drop kept answers: a checkpoint has recorded that they were trained on."""


class SingleAnswers(Answers):
    """One generated text per answer.

    Args:
        rollout: The instances that generate.
        tokenizer: The tokenizer of the model.
        scorer: The rewards.
    """

    def __init__(
        self, rollout: RolloutController, tokenizer: FolderTokenizer, scorer: Scorer
    ) -> None:
        self._rollout, self._tokenizer, self._scorer = rollout, tokenizer, scorer

    async def answer(
        self, row: Row, samplings: Sequence[SamplingParams], draw: Draw | None = None
    ) -> list[Outcome]:
        """Generate an answer per sampling, and compute the rewards of all."""

        async def complete(sampling: SamplingParams) -> Completion:
            result = await self._rollout.async_generate_one(row.prompt_ids, sampling)
            return Completion(self._tokenizer.decode(result.token_ids), result)

        completions = [asyncio.ensure_future(complete(sampling)) for sampling in samplings]
        scored = await self._scorer.score(row, completions)
        return [
            ([single_sample(row.prompt_ids, completion.result().result, each.total)], each)
            for completion, each in zip(completions, scored, strict=True)
        ]


def single_sample(prompt_ids: list[int], result: GenerationResult, reward: float) -> Sample:
    """Return the training sample of one generated answer.

    Args:
        prompt_ids: Tokens of the prompt.
        result: The answer.
        reward: Its reward.
    """
    num_prompt, num_new = len(prompt_ids), len(result.token_ids)
    return Sample(
        input_ids=prompt_ids + result.token_ids,
        loss_mask=[0] * num_prompt + [1] * num_new,
        logprobs=[0.0] * num_prompt + result.logprobs,
        versions=[-1] * num_prompt + result.versions,
        turn_ends=[num_prompt + num_new],
        turn_rewards=[0.0],
        reward=reward,
        session_id="",
        is_truncated=result.stop_reason == "length",
    )


_GIVEN = ("task", "base_url", "api_key", "model", "session")
"""Parameters that an agent's function may have."""


class AgentAnswers(Answers):
    """Sessions of an agent, a function or a program, which returns the reward.

    Finished sessions are kept in the gateway's journal until a checkpoint has recorded their draw.
    A restarted run uses them again if they are not older than ``staleness`` allows.

    Args:
        gateway: The gateway in front of the instances.
        settings: The agent and its limits.
        staleness: Maximum steps between a session's start and its use.
        functions: Functions that the script passed, by name.

    Raises:
        ValueError: There is no such agent, or it cannot be called.
    """

    def __init__(
        self,
        gateway: AgentGateway,
        settings: Agent,
        staleness: float = 0.0,
        functions: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._gateway, self._settings = gateway, settings
        self._staleness, self._step = math.ceil(staleness), 0
        self._first_step, self._run_id = 0, ""
        self._function = None if settings.command else find_agent(settings.use, functions or {})
        self._limits = SessionLimits(
            max_tokens=settings.max_tokens,
            max_turns=settings.max_turns,
            max_context=settings.max_context,
            truncated_reward=settings.truncated_reward,
        )

    def set_step(self, step: int) -> None:
        """Set the training step of later sessions."""
        self._step = step

    def begin(self, step: int) -> None:
        """Begin at a step, with the weights of the step before."""
        self._first_step, self._run_id = step, uuid.uuid4().hex

    def forget(self, draws: Sequence[Draw]) -> None:
        """Drop kept sessions."""
        self._gateway.forget(
            [_name(draw, index) for draw in draws for index in range(len(draw.seeds))]
        )

    async def answer(
        self, row: Row, samplings: Sequence[SamplingParams], draw: Draw | None = None
    ) -> list[Outcome]:
        """Run a session per sampling."""

        async def one(index: int, sampling: SamplingParams) -> Outcome:
            name = None if draw is None else _name(draw, index)
            record = self._kept(name) or await self._run(row, sampling, name)
            return record.samples, Scored({AGENT_REWARD: record.reward}, record.reward)

        tasks = [asyncio.ensure_future(one(*each)) for each in enumerate(samplings)]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise

    def _kept(self, name: str | None) -> SessionRecord | None:
        if name is None or (record := self._gateway.finished(name)) is None:
            return None
        newest = max((max(sample.versions) for sample in record.samples), default=0)
        if record.metadata.get("run") != self._run_id and newest >= self._first_step:
            return None  # weights that came after the checkpoint are lost
        age = self._step - int(record.metadata.get("step", 0))
        return record if 0 <= age <= self._staleness else None

    async def _run(self, row: Row, sampling: SamplingParams, name: str | None) -> SessionRecord:
        with self._gateway.session(
            name,
            limits=self._limits,
            seed=sampling.seed,
            sampling=sampling,
            metadata={"step": self._step, "run": self._run_id},
            is_kept=name is not None,
        ) as session:
            limit = asyncio.timeout(self._settings.timeout_s)
            try:
                async with limit:
                    returned = await self._call(row, session)
            except Exception as error:  # agents raise any exception when a limit ends their session
                if limit.expired():
                    raise TimeoutError(
                        f"the agent did not end within {self._settings.timeout_s:g} s "
                        f"(agent.timeout_s), after {session.num_turns} turns of the model"
                    ) from error
                if not session.is_truncated or self._limits.truncated_reward is None:
                    raise
                returned = session.reward
            reward = _reward_of(returned, session)
            if not session.num_turns:
                raise ValueError(
                    "the agent ended without a turn of the model; expected it to use base_url, "
                    f"which is {session.base_url}"
                )
            session.reward = reward
        return session.record()

    async def _call(self, row: Row, session: AgentSession) -> Any:
        function = self._function
        if function is None:
            task = msgspec.json.encode(row.entry).decode()
            environment = {**session.environment, "HELMSMAN_TASK": task}
            await run_program(self._settings.command, environment)
            return None
        everything = {
            "task": row.entry,
            "base_url": session.base_url,
            "api_key": session.key,
            "model": self._gateway.model,
            "session": session,
        }
        names = inspect.signature(function).parameters
        given = {name: value for name, value in everything.items() if name in names}
        if inspect.iscoroutinefunction(function):
            return await function(**given)
        returned = await run_in_new_thread(lambda: function(**given))
        return await returned if inspect.isawaitable(returned) else returned


def find_agent(use: str, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return an agent's function, which is imported unless the script passed it.

    Args:
        use: Import path, or name of a function that the script passed.
        functions: Those functions.

    Raises:
        ValueError: There is no such function, or it has parameters that agents do not receive.
    """
    function = functions.get(use) or find_function(use, "agent")
    for each in inspect.signature(function).parameters.values():
        if each.name not in _GIVEN and each.default is each.empty:
            raise ValueError(
                f"the agent {getattr(function, '__name__', function)!r} has the parameter "
                f"{each.name!r}; expected some of {', '.join(_GIVEN)}"
            )
    return function


def _reward_of(returned: Any, session: AgentSession) -> float:
    if isinstance(returned, Mapping):
        returned = returned.get("reward")
    if returned is None and session.is_rated:
        returned = session.reward
    if (number := finite(returned)) is not None:
        return number
    raise ValueError(
        f"the agent returned {returned!r:.80}; expected its reward, a mapping with 'reward', or "
        "None if it has set session.reward or posted a reward"
    )


def _name(draw: Draw, index: int) -> str:
    return f"{draw.number}/{index}"
