"""Environments written for SkyRL and for NeMo-RL, trained on episodes of several turns.

    python examples/port_environments.py --env skyrl
    python examples/port_environments.py --env nemo_rl

The classes have the methods that those libraries call: `init` and `step(action)` of a SkyRL
environment, `step(message_log_batch, metadata)` of a NeMo-RL environment. An episode function
drives them. The task suits a tiny model that the script creates: name a digit, then a larger one.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from helmsman import Job, RolloutController, SamplingParams, TrainController, make_scheduler
from helmsman.api.advantages import group_advantages
from helmsman.recipes import make_model
from helmsman.recipes.tokens import FolderTokenizer

GROUPS, SAMPLES, MAX_TURNS = 4, 8, 2
SAMPLING = SamplingParams(max_new_tokens=4)
Message = dict[str, str]


def score(answer: str, last: int) -> tuple[float, int]:
    """Return reward and digit of a turn: half for a digit, the other half for a larger one."""
    found = re.search(r"\d", answer)
    digit = int(found[0]) if found else -1
    return (0.5 if found else 0.0) + (0.5 if digit > last else 0.0), max(digit, last)


class LargerEnv:
    """One episode, in the form of SkyRL's BaseTextEnv."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        self.turns, self.last = 0, (extras or {}).get("start", -1)

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Return the first messages."""
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        """Take the model's answer."""
        self.turns += 1
        reward, self.last = score(action, self.last)
        done = self.turns == MAX_TURNS
        observations = [] if done else [{"role": "user", "content": f">{self.last}:"}]
        return {"observations": observations, "reward": reward, "done": done, "metadata": {}}


class EnvironmentReturn(NamedTuple):
    """NeMo-RL's result of a step; every field has an entry for each episode."""

    observations: list[Message]
    metadata: list[Any]
    next_stop_strings: list[Any]
    rewards: list[float]
    terminateds: list[bool]
    answers: list[Any] | None


class LargerEnvironment:
    """All episodes, in the form of NeMo-RL's EnvironmentInterface; metadata has their states."""

    def step(
        self, message_log_batch: list[list[Message]], metadata: list[Any]
    ) -> EnvironmentReturn:
        """Take the model's last answers."""
        scored = [
            score(log[-1]["content"], state["last"])
            for log, state in zip(message_log_batch, metadata, strict=True)
        ]
        turns = [state["turns"] + 1 for state in metadata]
        return EnvironmentReturn(
            [{"role": "environment", "content": f">{last}:"} for _, last in scored],
            [{"turns": turn, "last": last} for turn, (_, last) in zip(turns, scored, strict=True)],
            [None] * len(scored),
            [reward for reward, _ in scored],
            [turn == MAX_TURNS for turn in turns],
            None,
        )


Turn = Callable[[str], tuple[str, float, bool]]
"""Takes an answer; returns the next text for the model, the reward, and whether it was the last."""


def skyrl_turn(env: LargerEnv, answer: str) -> tuple[str, float, bool]:
    """Take one step of a SkyRL environment."""
    output = env.step(answer)
    text = "".join(each["content"] for each in output["observations"])
    return text, output["reward"], output["done"]


def nemo_rl_turn(env: LargerEnvironment, states: list[Any], answer: str) -> tuple[str, float, bool]:
    """Take one step of a NeMo-RL environment, for a batch of one episode."""
    found = env.step([[{"role": "assistant", "content": answer}]], states)
    states[:] = found.metadata
    return found.observations[0]["content"], found.rewards[0], found.terminateds[0]


def make_turn(env: str) -> Turn:
    """Begin an episode of the named library's environment."""
    if env == "skyrl":
        return functools.partial(skyrl_turn, LargerEnv(extras={"start": -1}))
    return functools.partial(nemo_rl_turn, LargerEnvironment(), [{"turns": 0, "last": -1}])


async def episode(
    rollout: RolloutController, text: FolderTokenizer, prompt: str, turn: Turn
) -> tuple[float, dict[str, Any]]:
    """Generate in turns; the model reads the environment's text, and it is not trained on."""
    ids = text.encode_prompt(prompt)
    mask, logprobs, total, done = [0] * len(ids), [0.0] * len(ids), 0.0, False
    while not done:
        answer = await rollout.async_generate_one(ids, SAMPLING)
        said, reward, done = turn(text.decode(answer.token_ids))
        observed = text.encode_answer(said) if said and not done else []
        ids = ids + answer.token_ids + observed
        mask += [1] * len(answer.token_ids) + [0] * len(observed)
        logprobs += answer.logprobs + [0.0] * len(observed)
        total += reward / MAX_TURNS
    return total, {"input_ids": ids, "loss_mask": mask, "logprobs": logprobs}


async def gather(
    rollout: RolloutController, text: FolderTokenizer, env: str
) -> list[tuple[float, dict[str, Any]]]:
    """Run the episodes of a step together."""
    prompts = [f"{number}>" for number in range(GROUPS) for _ in range(SAMPLES)]
    running = [episode(rollout, text, prompt, make_turn(env)) for prompt in prompts]
    return list(await asyncio.gather(*running))


def main() -> None:
    """Train, and print the mean reward of each step."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--env", choices=("skyrl", "nemo_rl"), default="skyrl")
    parser.add_argument("--scheduler", choices=("local", "ray"), default="local")
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    model = str(make_model(Path("runs/port_environments"), num_layers=2, width=64))
    text = FolderTokenizer(model)
    with (
        make_scheduler(given.scheduler) as scheduler,
        TrainController(
            *(scheduler, "helmsman.engines.train.FSDPTrainEngine", Job(role="train")),
            engine_kwargs={"model": model, "lr": 3e-3},
        ) as train,
        RolloutController(
            *(scheduler, "helmsman.engines.rollout.HFRolloutEngine", Job(role="rollout")),
            engine_kwargs={"model": model},
        ) as rollout,
    ):
        for step in range(given.steps):
            found = asyncio.run(gather(rollout, text, given.env))
            rewards = [reward for reward, _ in found]
            advantages = group_advantages(rewards, group_size=SAMPLES)
            samples = [
                {**sample, "advantages": advantage}
                for (_, sample), advantage in zip(found, advantages, strict=True)
            ]
            train.train_batch(samples, "grpo")
            train.update_rollout(rollout)
            print(f"step {step}  reward {sum(rewards) / len(rewards):.3f}", flush=True)


if __name__ == "__main__":
    main()
