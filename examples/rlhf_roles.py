"""PPO with five roles as worker groups, in one script: on processes of this machine, on Ray, or in
a debugger.

    python examples/rlhf_roles.py                      # processes of this machine
    python examples/rlhf_roles.py --scheduler ray      # on an embedded Ray, with the same output
    python examples/rlhf_roles.py --scheduler inline   # the same in this process, for breakpoints

It needs no accelerator: the eight devices are only numbers, and the workers use the CPU. A step is
`Roles.step`; the methods of the workers, in rlhf_workers.py, declare the distribution of arguments
and results.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# the script is run by its path, and imports its neighbours
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.rlhf_workers import (
    LENGTH,
    STRIDE,
    VOCABULARY,
    ActorInfer,
    ActorTrain,
    Array,
    Critic,
    Reference,
    Reward,
    Role,
)
from helmsman import (
    Batch,
    Cluster,
    ClusterConfig,
    HelmsmanError,
    ResourceManager,
    Scheduler,
    make_scheduler,
)
from helmsman.recipes.interrupts import Interrupted, interruptible

NUM_DEVICES = 8
NUM_PROMPTS = 63
"""Prompts of a step. Two data-parallel ranks get 32 and 31, or 32 each with a row of padding."""
NUM_EPOCHS = 3
KL_WEIGHT = 0.02
DISCOUNT = 0.3
LEARNING_RATE = 20.0


# Each names the declared methods of its workers, so that editors and type checkers know them.
class ActorTrainCluster(Cluster[ActorTrain]):
    log_probs = ActorTrain.log_probs
    gradient = ActorTrain.gradient
    apply = ActorTrain.apply
    weights = ActorTrain.weights
    statistics = ActorTrain.statistics


class ActorInferCluster(Cluster[ActorInfer]):
    load = ActorInfer.load
    generate = ActorInfer.generate
    checkpoint = ActorInfer.checkpoint


class ReferenceCluster(Cluster[Reference]):
    embed = Reference.embed
    log_probs = Reference.log_probs


class CriticCluster(Cluster[Critic]):
    values = Critic.values
    fit = Critic.fit


class RewardCluster(Cluster[Reward]):
    score = Reward.score


class Roles:
    """The five groups. Actors and critic share devices 0 to 3, the reference has devices 4 to 7,
    and the reward needs none.
    """

    def __init__(self, resources: ResourceManager, seed: int, held: contextlib.ExitStack) -> None:
        config = functools.partial(ClusterConfig, env_vars={"HELMSMAN_PLATFORM": "cpu"})
        trains = config(device_mapping="0-3", dp_size=2, tp_size=2)
        infers = config(device_mapping="0-3", num_gpus_per_worker=2)
        refers = config(device_mapping="4-7", dp_size=2, pp_size=2)
        values = config(device_mapping="0-3", num_gpus_per_worker=4)
        scores = config(world_size=1)

        start = held.enter_context
        self.seed = seed
        self.actor_train = start(
            ActorTrainCluster(
                "actor_train", ActorTrain, resources, trains, args=(seed, LEARNING_RATE)
            )
        )
        self.actor_infer = start(
            ActorInferCluster("actor_infer", ActorInfer, resources, infers, args=(seed,))
        )
        self.reference = start(
            ReferenceCluster("reference", Reference, resources, refers, args=(seed,))
        )
        self.critic = start(CriticCluster("critic", Critic, resources, values, args=(seed,)))
        self.reward = start(RewardCluster("reward", Reward, resources, scores, args=(seed,)))

    @property
    def all(self) -> tuple[Cluster[Role], ...]:
        """Return the groups in the order of their start."""
        return self.actor_train, self.actor_infer, self.reference, self.critic, self.reward

    def step(self, step: int) -> str:
        """Answer prompts, score the answers and learn from them; returns a line of figures."""
        self.bring_weights()
        prompts = np.random.default_rng([self.seed, 3, step]).integers(VOCABULARY, size=NUM_PROMPTS)
        asked = Batch({"row": np.arange(NUM_PROMPTS), "prompt": prompts})

        # The answers stay in the workers that generated them, which send them to the workers of the
        # next three roles.
        with self.actor_infer.generate.keep(asked, step, temperature=1.0) as rollout:
            values = self.critic.values.submit(rollout)
            with self.reference.embed.keep(rollout) as hidden:
                # so do activations, from stage to stage
                # at the same time as the critic's values
                referred = self.reference.log_probs.submit(rollout, hidden)
                rewards = self.reward.score(rollout)
                references = referred.result()
            assert references is not None  # the last stage has answered
            batch = with_advantages(rollout.union(rewards).union(values.result()).union(references))

        fitted = self.critic.fit.submit(batch)
        for _ in range(NUM_EPOCHS):
            self.actor_train.apply(
                self.actor_train.gradient(self.with_log_probs(batch)) / batch["tokens"].size
            )
        parts = [
            part
            for part in self.actor_train.statistics(self.with_log_probs(batch))
            if part is not None
        ]
        num_tokens, num_clipped, kl = (
            sum(part[name] for part in parts) for name in ("tokens", "clipped", "kl")
        )
        return (
            f"step {step:>2}  reward {batch['rewards'].mean():.4f}  kl {kl / num_tokens:.4f}  "
            f"clipped {num_clipped / num_tokens:.4f}  critic error "
            f"{fitted.result()[0]['error']:.4f}"
        )

    def with_log_probs(self, batch: Batch) -> Batch:
        """Add log-probabilities of the answers under the trainer's current weights."""
        return batch.union(self.actor_train.log_probs(batch))

    def bring_weights(self) -> None:
        """Send the trainer's shards to every rollout worker, not through this script."""
        with self.actor_train.weights.keep() as weights:
            self.actor_infer.load(weights)

    def evaluate(self) -> Batch:
        """Answer every prompt by greedy decoding."""
        self.bring_weights()
        asked = Batch({"row": np.arange(VOCABULARY), "prompt": np.arange(VOCABULARY)})
        answers = self.actor_infer.generate(asked, 0, temperature=0.0)
        return answers.union(self.reward.score(answers))


def with_advantages(batch: Batch) -> Batch:
    """Add ``returns``, discounted and less the penalty for the distance from the reference, and
    ``advantages`` over the critic.
    """
    rewards: Array = batch["rewards"] - KL_WEIGHT * (
        batch["old_log_probs"] - batch["reference_log_probs"]
    )
    returns = rewards.copy()
    for position in reversed(range(LENGTH - 1)):
        returns[:, position] += DISCOUNT * returns[:, position + 1]
    advantages = returns - batch["values"]
    return batch.with_columns(
        returns=returns, advantages=(advantages - advantages.mean()) / (advantages.std() + 1e-8)
    )


# --- output ---------------------------------------------------------------------------------------


def show_placement(resources: ResourceManager, clusters: Sequence[Cluster[Any]]) -> None:
    """Print the holders of each device and the coordinates of each rank; addresses and times are
    left out, since they vary.
    """
    for device in resources.devices:
        holders = ", ".join(
            f"{each.holder}/{each.rank}" for each in resources.holders(device.index)
        )
        print(f"device {device.index} of node {device.node_rank}: {holders}")
    for cluster in clusters:
        print(f"\n{cluster.name}")
        for rank, devices in cluster.rank_to_devices.items():
            held = ",".join(str(device.index) for device in devices) or "-"
            print(f"  rank {rank}  {cluster.get_rank_info(rank)}  devices {held}")


def show_rows(clusters: Sequence[Cluster[Role]]) -> None:
    """Print the number of rows that the last call of each method sent to each rank."""
    print("\nrows that each rank was given (-: called with None)")
    for cluster in clusters:
        received = cluster.method(Role.rows_received)()
        for method in received[0]:
            counts = ["-" if rows[method] is None else str(rows[method]) for rows in received]
            print(
                f"  {f'{cluster.name}.{method}':<24} {'  '.join(f'{count:>2}' for count in counts)}"
            )


def run(scheduler: Scheduler, num_steps: int, seed: int) -> None:
    """Start the roles, train and print the results."""
    with (
        ResourceManager(NUM_DEVICES, num_nodes=1, scheduler=scheduler) as resources,
        contextlib.ExitStack() as held,
    ):
        roles = Roles(resources, seed, held)
        show_placement(resources, roles.all)
        print()
        for step in range(1, num_steps + 1):
            print(roles.step(step), flush=True)
        show_rows(roles.all)
        answers = roles.evaluate()
        digest = hashlib.sha256(roles.actor_infer.checkpoint().tobytes()).hexdigest()
        print(f"\nwithout chance, every token {STRIDE} after the one before it (of {VOCABULARY}):")
        for answer in answers[:4]:
            print(f"  {answer['prompt']} -> {' '.join(map(str, answer['tokens']))}")
        print(f"right: {answers['rewards'].mean():.1%} of the tokens; weights {digest[:16]}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="PPO with five roles as worker groups, on any scheduler."
    )
    parser.add_argument(
        "--scheduler",
        help="what runs the workers (default: local)",
        choices=("local", "ray", "inline"),
    )
    parser.add_argument("--steps", help="PPO steps (default: %(default)s)", type=int, default=15)
    parser.add_argument(
        "--seed", help="of everything that is drawn (default: %(default)s)", type=int, default=0
    )
    parser.set_defaults(scheduler="local")
    given = parser.parse_args(argv)
    for name in ("steps", "seed"):
        if getattr(given, name) < 0:
            parser.error(f"--{name} is {getattr(given, name)}; expected 0 or more")
    options: dict[str, dict[str, Any]] = {
        "local": {"num_gpus": NUM_DEVICES, "preload": ("numpy",)},
        "ray": {"address": "local", "num_cpus": 4, "num_gpus": NUM_DEVICES},
        "inline": {"num_gpus": NUM_DEVICES},
    }
    try:
        with (
            interruptible(),
            make_scheduler(
                given.scheduler, seed=given.seed, **options[given.scheduler]
            ) as scheduler,
        ):
            run(scheduler, given.steps, given.seed)
    except Interrupted as interrupt:
        print(f"stopped by {interrupt}; all workers have ended.", file=sys.stderr)
        return interrupt.exit_code
    except HelmsmanError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
