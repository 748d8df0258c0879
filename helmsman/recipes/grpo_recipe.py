"""The recipes GRPO (with Dr. GRPO and DAPO) and PPO: arguments, data, workers and parts.

Their loop is in ``grpo``.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import msgspec

from helmsman import Checkpoints, Job, RolloutController, Scheduler
from helmsman.agents import AgentGateway
from helmsman.api.extras import needed_by
from helmsman.recipes.answers import AgentAnswers, Answers, SingleAnswers, find_agent
from helmsman.recipes.critic import CriticModel
from helmsman.recipes.devices import Devices
from helmsman.recipes.episodes import Episodes
from helmsman.recipes.grpo import GRPOLoop
from helmsman.recipes.judges import Judge
from helmsman.recipes.prompts import Dataset, Draws
from helmsman.recipes.recipe import Recipe
from helmsman.recipes.recorded import RolloutFiles
from helmsman.recipes.reference import FrozenReference, make_reference
from helmsman.recipes.rewards import Caller, make_caller
from helmsman.recipes.roles import judge_role, make_jobs, make_rollout, start_ranks
from helmsman.recipes.run import RecipeRun
from helmsman.recipes.scorer import Scorer
from helmsman.recipes.settings import GRPOSettings, Reward, RunSettings
from helmsman.recipes.teacher import Teacher
from helmsman.recipes.trackers import Trackers

RewardLike: TypeAlias = str | Callable[..., Any] | Mapping[str, Any] | Reward
"""Name of a built-in reward, import path, function, or fields of a ``Reward``."""


class GRPO(Recipe[GRPOSettings]):
    """Train a language model by GRPO, Dr. GRPO or DAPO on prompts and rewards.

        GRPO(model="models/qwen", data="train.jsonl", rewards=["math"], steps=200).train()

    Args:
        model: Local Hugging Face folder of the initial model.
        data: A file, a dataset folder, a list of them, a table, any iterable of rows, or a mapping
            with the keys of ``data``.
        rewards: Functions, names of built-in rewards (``exact``, ``number``, ``format``, ``math``),
            import paths (``pkg.mod:fn`` or ``path/file.py:fn``), or mappings with the keys of
            ``rewards[]``.
        agent: In place of rewards, an agent that uses the model through the API of OpenAI or
            Anthropic, and returns its reward: a function, its import path, or a mapping with the
            keys of ``agent``.
        **settings: The other arguments of Recipe: ``config``, ``resume``, ``overwrite``, and
            sections and keys of GRPOSettings.

    Raises:
        ValueError: Settings are invalid or do not fit together.
        OSError: The configuration cannot be read.
        BackendNotInstalledError: The configuration needs a package that is missing.
    """

    kind: ClassVar[type[RunSettings]] = GRPOSettings
    fixed: ClassVar[tuple[str, ...]] = ("model", "data", "seed", "samples_per_prompt")

    def __init__(
        self,
        model: str | Path | None = None,
        data: str | Path | Mapping[str, Any] | Iterable[Any] | None = None,
        rewards: Sequence[RewardLike] | RewardLike | None = None,
        *,
        agent: str | Callable[..., Any] | Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        """Rewards and agents passed as functions, by ``use``."""
        if agent is not None:
            settings["agent"] = self._entries(agent)
        if rewards is not None:
            is_one = isinstance(rewards, str | Mapping | Reward) or callable(rewards)
            each: Any = [rewards] if is_one else rewards
            settings["rewards"] = [self._entries(reward) for reward in each]
        super().__init__(model, data, **settings)

    def _entries(self, given: RewardLike) -> dict[str, Any]:
        """Return the entries of a reward or an agent, with import paths for its functions."""
        if isinstance(given, Reward):
            return msgspec.structs.asdict(given)
        entries: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"use": given}
        for key in ("use", "parse"):
            if callable(function := entries.get(key)):
                name = getattr(function, "__name__", type(function).__name__)
                path = entries[key] = f"{getattr(function, '__module__', '')}:{name}"
                count = 1
                while self.functions.setdefault(entries[key], function) != function:
                    count += 1  # another partial, or another object of the same class
                    entries[key] = f"{path}_{count}"
        return entries

    def load_data(self) -> Dataset:
        """Read tokenizer and prompts, and resolve the rewards.

        Raises:
            ValueError: The tokenizer, a row or a reward is invalid.
            OSError: A file cannot be read.
            BackendNotInstalledError: A package is missing.
        """
        dataset = super().load_data()
        settings, functions, self._callers = self.settings, self.functions, list[Caller]()
        self._recording = RolloutFiles(settings, self.tokenizer)
        self._judges = [Judge(reward, settings, functions) for reward in settings.judges]
        if self.settings.rollout.is_recorded:
            return dataset  # answers have their rewards
        plain = [reward for reward in settings.rewards if not reward.judge]
        self._callers = [make_caller(reward, functions) for reward in plain]
        agent = self.settings.agent
        if agent.is_given:
            with needed_by("the agent's gateway", "aiohttp"):
                importlib.import_module("aiohttp")
        if agent.use:
            find_agent(agent.use, self.functions)
        return dataset

    def check(self) -> None:
        """Check folders, values of the rows that rewards require, and a recording; see Recipe."""
        super().check()
        settings = self.settings
        if settings.rollout.is_recorded:
            kept = Checkpoints(Path(settings.out) / "checkpoints", settings.checkpoints.keep)
            found = kept.latest() if self.resume else None
            seed, shuffle = settings.seed, settings.data.shuffle
            draws = Draws(self.dataset.train, num_samples=1, seed=seed, shuffle=shuffle)
            self._recording.require(1 if found is None else found[0] + 1, draws)
        for row in (*self.dataset.train, *self.dataset.held_out):
            for judge in self._judges:
                judge.require_row(row)
            for caller in self._callers:
                try:
                    caller.require_row(row.entry, row.answer)
                except ValueError as error:
                    raise ValueError(
                        f"unusable row ({row.place}): {error}, expected an answer as text by "
                        f"{self.settings.data.answer_key!r} (data.answer_key). Mend the row, or "
                        "give the parameter of your own reward a default."
                    ) from error

    def describe(self) -> str:
        """Return a description of choices, data and recorded rollouts, one per line."""
        text, rollout = super().describe(), self.settings.rollout
        if rollout.record:
            text += f"\nrollouts: recorded in {self.settings.out}/rollouts"
        is_rated = bool(self.settings.rewards) or self.settings.agent.is_given
        if self.dataset.held_out and not is_rated:
            text += "\nevaluations: none without rewards; one of weight 0 measures alone"
        if rollout.is_recorded:
            text += f"\nrollouts: those of {rollout.recorded}; without instances and evaluations"
        return text

    def inputs(self) -> dict[str, str]:
        """Return the folders that the run reads, by their settings; empty without one."""
        settings = self.settings
        judges = {f"rewards[{i}].judge": each.judge for i, each in enumerate(settings.rewards)}
        others = {**judges, "rollout.recorded": settings.rollout.recorded}
        return {**super().inputs(), **{name: each or "" for name, each in others.items()}}

    def jobs(self) -> list[Job]:
        """Return the jobs of trainer, rollout, reference (with a KL term), critic and judges."""
        return make_jobs(self.settings)

    def start(
        self, held: contextlib.ExitStack, scheduler: Scheduler, jobs: Mapping[str, Job]
    ) -> Callable[[Trackers], None]:
        """Start trainer, reference, critic, rollout, judges and rewards."""
        settings = self.settings
        is_recorded = settings.rollout.is_recorded
        ranked = start_ranks(settings, scheduler, jobs)
        trainer, values = ranked["train"], ranked.get("critic")
        rollout: RolloutController | None = None
        answers = Answers()
        if not is_recorded:
            rollout = make_rollout(settings, scheduler, jobs["rollout"])
            rollout.initialize()
            if settings.agent.is_given:
                gateway = held.enter_context(self._gateway(rollout))
                staleness = settings.rollout.staleness
                answers = AgentAnswers(gateway, settings.agent, staleness, self.functions)
            else:
                for judge in self._judges:
                    judge.serve(scheduler, jobs[judge_role(judge.reward)])
                scorer = Scorer(settings.rewards, scheduler, self.functions, self._judges)
                answers = SingleAnswers(rollout, self.tokenizer, held.enter_context(scorer))
        elif settings.cluster.takes_turns:
            trainer.wake()  # and keeps the devices

        reference = make_reference(ranked, settings) if settings.algorithm.kl_coef else None
        teacher: Teacher | None = None
        if (frozen := ranked.get("teacher")) is not None:
            found, own = FrozenReference(frozen, settings), settings.algorithm
            teacher = Teacher(found, own.teacher_coef, own.teacher_top_k, self.num_teacher_ids)

        def train(trackers: Trackers) -> None:
            rows, num_samples = self.dataset.train, settings.samples_per_prompt
            run = RecipeRun(settings, trainer, rows, trackers, num_samples=num_samples)
            devices = Devices(settings, trainer, rollout, self.dataset, run.clock)
            critic = None if values is None else CriticModel(values, settings)
            episodes = held.enter_context(
                contextlib.closing(Episodes(settings, run.draws, answers, self._recording))
            )
            is_rated = bool(settings.rewards) or settings.agent.is_given
            run.parts = [episodes, *([] if critic is None else [critic]), devices]
            run.others = [] if values is None else [values]
            GRPOLoop(
                run=run,
                trainer=trainer,
                devices=devices,
                episodes=episodes,
                answers=answers,
                reference=reference,
                teacher=teacher,
                critic=critic,
                held_out=self.dataset.held_out if is_rated and not is_recorded else [],
                tokenizer=self.tokenizer,
            ).train()

        return train

    def _gateway(self, rollout: RolloutController) -> AgentGateway:
        settings = self.settings
        return AgentGateway(
            rollout,
            self.tokenizer.tokenizer,
            sampling=settings.sampling,
            host=settings.agent.host,
            port=settings.agent.port,
            public_url=settings.agent.public_url,
            max_context=settings.max_model_len,
            family=settings.agent.family,
            stop_token_ids=self.tokenizer.stop_ids,
            journal=Path(settings.out) / "sessions.sqlite",
        )


def PPO(  # noqa: N802 - used like the recipe classes
    model: str | Path | None = None,
    data: str | Path | Mapping[str, Any] | Iterable[Any] | None = None,
    rewards: Sequence[RewardLike] | RewardLike | None = None,
    **settings: Any,
) -> GRPO:
    """Train a language model by PPO with a critic: the loop of GRPO with the preset ``ppo``.

    Args:
        model: Local Hugging Face folder of the initial model, also of the critic.
        data: A file, a dataset folder, a list of them, a table, any iterable of rows, or a mapping
            with the keys of ``data``.
        rewards: Functions, names of built-in rewards, import paths, or mappings with the keys of
            ``rewards[]``.
        **settings: The other arguments of GRPO; ``critic`` has the settings of the value model.

    Returns:
        The recipe; ``.train()`` runs it.

    Raises:
        ValueError: Settings are invalid or do not fit together.
        OSError: The configuration cannot be read.
        BackendNotInstalledError: The configuration needs a package that is missing.
    """
    algorithm = {**settings.pop("algorithm", {}), "preset": "ppo"}
    return GRPO(model, data, rewards, algorithm=algorithm, **settings)


PPO.kind = GRPOSettings  # type: ignore[attr-defined]  # the command line reads it, as from the classes
