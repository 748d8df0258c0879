"""A script in ROLL's style, with its imports replaced: RLVR with rewards of two domains.

    python examples/port_roll_rlvr.py                     # processes of this machine
    python examples/port_roll_rlvr.py --scheduler ray     # an embedded Ray, with the same output

It needs no accelerator: the eight devices are only numbers, on which ``device_mapping`` colocates
the roles. The policy is a table, so that it learns within seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from helmsman import Batch, ClusterConfig, make_scheduler
from helmsman.compat.roll import (
    Cluster,
    Dispatch,
    ResourceManager,
    Worker,
    get,
    register,
)

VOCABULARY, LENGTH, PROMPTS, SAMPLES = 10, 4, 16, 8
LEARNING_RATE, KL_WEIGHT = 2.0, 0.01
DOMAINS = ("successor", "mirror")


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


class Policy(Worker):
    """A table of logits: (domain, last token, next token)."""

    def __init__(self, worker_config: Any) -> None:
        super().__init__(worker_config)
        self.logits = np.zeros((len(DOMAINS), VOCABULARY, VOCABULARY))

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def compute_log_probs(self, data: Batch) -> Batch:
        """Return log-probabilities of the answers' tokens, (rows, tokens)."""
        rows = probabilities(self.logits[data["domain"][:, None], data["tokens"][:, :-1]])
        chosen = np.take_along_axis(rows, data["tokens"][:, 1:, None], -1)[..., 0]
        return Batch({"log_probs": np.log(chosen)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, logits: np.ndarray) -> None:
        """Replace the table."""
        self.logits = logits.copy()


class ActorInfer(Policy):
    """Generates answers."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def generate(self, data: Batch) -> Batch:
        """Continue each prompt by LENGTH tokens."""
        tokens = [data["prompt"]]
        for drawn in data["drawn"].T:
            rows = probabilities(self.logits[data["domain"], tokens[-1]])
            chosen = (rows.cumsum(-1) < drawn[:, None]).sum(-1)
            tokens.append(chosen.clip(max=VOCABULARY - 1))
        return data.with_columns(tokens=np.stack(tokens, 1))


class ActorTrain(Policy):
    """Learns by policy gradient."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def compute_gradient(self, data: Batch) -> list[np.ndarray]:
        """Return the gradient of this rank's rows."""
        where = (data["domain"][:, None], data["tokens"][:, :-1])
        slope = np.eye(VOCABULARY)[data["tokens"][:, 1:]] - probabilities(self.logits[where])
        gradient = np.zeros_like(self.logits)
        np.add.at(gradient, where, slope * data["advantages"][..., None])
        return [gradient]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL_ONE)
    def train_step(self, gradient: np.ndarray) -> np.ndarray:
        """Apply the sum of all ranks' gradients, and return the weights."""
        self.logits = self.logits + LEARNING_RATE * gradient
        return self.logits


class Critic(Worker):
    """A table of values: (domain, last token)."""

    def __init__(self, worker_config: Any) -> None:
        super().__init__(worker_config)
        self.table = np.zeros((len(DOMAINS), VOCABULARY))

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def compute_values(self, data: Batch) -> Batch:
        """Return the expected reward of each token."""
        return Batch({"values": self.table[data["domain"][:, None], data["tokens"][:, :-1]]})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fit(self, data: Batch) -> None:
        """Move the values towards the rewards."""
        where = (data["domain"][:, None], data["tokens"][:, :-1])
        np.add.at(self.table, where, 0.02 * (data["rewards"] - data["values"]))


class RuleReward(Worker):
    """Checks answers of one domain."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def compute_rewards(self, data: Batch) -> Batch:
        """Return 1 for each right token, (rows, tokens)."""
        last, following = data["tokens"][:, :-1], data["tokens"][:, 1:]
        right = VOCABULARY - 1 - last if self.cluster_name == "mirror" else (last + 3) % VOCABULARY
        return Batch({"row": data["row"], "rewards": (following == right).astype(float)})


class RLVRPipeline(contextlib.ExitStack):
    """The roles, and one step of training."""

    def __init__(self, resource_manager: ResourceManager, seed: int) -> None:
        super().__init__()
        self.seed = seed

        def start(name: str, worker_cls: type[Any], **config: Any) -> Cluster:
            on_cpu = ClusterConfig(**config, env_vars={"HELMSMAN_PLATFORM": "cpu"})
            cluster = Cluster(name, worker_cls, resource_manager, on_cpu)
            self.callback(cluster.close)
            return cluster

        self.actor_train = start("actor_train", ActorTrain, device_mapping="list(range(0,4))")
        self.actor_infer = start(
            "actor_infer", ActorInfer, device_mapping="list(range(0,8))", num_gpus_per_worker=2
        )
        self.reference = start("reference", Policy, device_mapping="list(range(4,8))")
        self.critic = start("critic", Critic, device_mapping="list(range(2,6))")
        self.rewards = [start(name, RuleReward, world_size=2) for name in DOMAINS]

    def step(self, step: int) -> float:
        """Answer, score and learn; returns the mean reward."""
        random = np.random.default_rng([self.seed, step])
        data = Batch(
            {
                "row": np.arange(PROMPTS * SAMPLES),
                "domain": (np.arange(PROMPTS) % len(DOMAINS)).repeat(SAMPLES),
                "prompt": random.integers(VOCABULARY, size=PROMPTS).repeat(SAMPLES),
                "drawn": random.random((PROMPTS * SAMPLES, LENGTH)),
            }
        )
        data = self.actor_infer.generate(data)
        pending = [
            self.rewards[domain].compute_rewards(part, blocking=False)
            for domain, part in data.group_by("domain").items()
        ]
        referred = self.reference.compute_log_probs(data, blocking=False)
        data = data.union(self.critic.compute_values(data))
        data = data.union(self.actor_train.compute_log_probs(data))
        scored = Batch.concat([part for each in pending for part in get(each)])
        rewards = scored["rewards"][np.argsort(scored["row"])]
        kl = data["log_probs"] - Batch.concat(get(referred))["log_probs"]
        data = data.with_columns(
            rewards=rewards, advantages=(rewards - data["values"] - KL_WEIGHT * kl) / SAMPLES
        )
        self.critic.fit(data)
        gradient = np.sum(self.actor_train.compute_gradient(data), 0)
        self.actor_infer.load_weights(self.actor_train.train_step(gradient))
        return float(rewards.mean())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pipeline; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--scheduler", choices=("local", "ray", "inline"), default="local")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    options: dict[str, Any] = {"address": "local"} if given.scheduler == "ray" else {}
    with (
        make_scheduler(given.scheduler, num_gpus=8, num_cpus=4, **options) as scheduler,
        ResourceManager(8, 1, scheduler=scheduler) as resource_manager,
        RLVRPipeline(resource_manager, given.seed) as pipeline,
    ):
        print(resource_manager.table())
        for step in range(given.steps):
            print(f"step {step:>2}  reward {pipeline.step(step):.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
