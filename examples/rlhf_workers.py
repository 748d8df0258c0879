"""The workers of `rlhf_roles.py`: five roles of PPO on a model so small that NumPy is enough.

A right response counts on from its prompt: after token ``p`` comes ``(p + STRIDE) % VOCABULARY``,
which only the reward checks. The policy is a fixed embedding of the previous token, and a trained
head with a row for each token of the vocabulary. Arrays are of float64, (N, LENGTH) for N responses
unless stated otherwise.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from helmsman import Batch, Dispatch, Execute, GroupWorker, register
from helmsman.api.topology import Topology
from helmsman.worker_groups import AxisSharding, Collect

VOCABULARY = 16
WIDTH = VOCABULARY
"""Width of embeddings; equals the number of tokens, so that all can be at right angles."""
LENGTH = 6
STRIDE = 3
CLIP = 0.2

Array: TypeAlias = NDArray[np.float64]
Tokens: TypeAlias = NDArray[np.int64]


def embedding(seed: int) -> Array:
    """Return (VOCABULARY, WIDTH), rows of length 1 at right angles."""
    return np.linalg.qr(np.random.default_rng([seed, 1]).normal(size=(VOCABULARY, WIDTH)))[0]


def initial_head(seed: int) -> Array:
    """Return (VOCABULARY, WIDTH), the actor's first head and the reference's head."""
    return np.random.default_rng([seed, 2]).normal(scale=0.3, size=(VOCABULARY, WIDTH))


def tokens_before(rollout: Batch) -> Tokens:
    """Return (N, LENGTH), the token before each token of a response."""
    before: Tokens = np.concatenate([rollout["prompt"][:, None], rollout["tokens"][:, :-1]], axis=1)
    return before


def log_sum_exp(logits: Array) -> Array:
    """Return log-sum-exp over the last axis."""
    largest: Array = logits.max(axis=-1, keepdims=True)
    total: Array = np.log(np.exp(logits - largest).sum(axis=-1)) + largest[..., 0]
    return total


def picked(logits: Array, tokens: Tokens) -> Array:
    """Return the logit of each token."""
    found: Array = np.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return found


class Role(GroupWorker):
    """Base of all workers, which counts the rows that reach it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.num_rows: dict[str, int | None] = {}

    def note(self, method: str, batch: Batch | None) -> None:
        """Record the number of rows of a call, or None for a call without rows."""
        self.num_rows[method] = None if batch is None else len(batch)

    @register(Dispatch.ONE_TO_ALL)
    def rows_received(self) -> dict[str, int | None]:
        """Return method -> rows of its last call, in this rank."""
        return self.num_rows


# --- the actor that learns: rows over dp, the vocabulary over tp ----------------------------------


def rows_over_dp(
    topology: Topology, batch: Batch
) -> tuple[list[list[Batch]], dict[str, list[Any]]]:
    """Give every rank the rows of its dp coordinate."""
    parts = batch.chunk(topology.dp_size, "uneven")
    return [[parts[info.dp_rank] for info in topology.ranks]], {}


def _by_coordinates(topology: Topology, results: list[Any]) -> list[list[Any]]:
    """Return the results as [dp][tp]."""
    return [
        [results[topology.rank_at(dp=dp, tp=tp)] for tp in range(topology.tp_size)]
        for dp in range(topology.dp_size)
    ]


def reduce_log_probs(topology: Topology, results: list[Any]) -> Batch:
    """Reduce a softmax whose vocabulary is sharded over tp, as an all-reduce would, and join the
    rows of dp.
    """
    reduced = []
    for shares in _by_coordinates(topology, results):
        normalizer = log_sum_exp(np.stack([share["normalizer"] for share in shares], axis=-1))
        chosen = sum(share["chosen"] for share in shares)
        reduced.append(Batch({"log_probs": chosen - normalizer, "normalizer": normalizer}))
    return Batch.concat(reduced)


def reduce_gradient(topology: Topology, results: list[Any]) -> Array:
    """Return the sum over dp, with the vocabulary's rows joined over tp."""
    total: Array = np.concatenate(
        [sum(shares) for shares in zip(*_by_coordinates(topology, results), strict=True)]
    )
    return total


class ActorTrain(Role):
    """Each tp rank has its rows of the head, each dp rank its share of the responses.

    The declarations of its methods stand for the collectives of a real trainer.
    """

    def __init__(self, seed: int, learning_rate: float) -> None:
        super().__init__(seed)
        self.learning_rate = learning_rate
        self.embedding = embedding(seed)
        self.num_tokens = VOCABULARY // self.rank_info.tp_size
        self.first = self.rank_info.tp_rank * self.num_tokens
        self.head = initial_head(seed)[self.first : self.first + self.num_tokens]

    def _logits(self, rollout: Batch) -> tuple[Array, NDArray[np.bool_], Tokens]:
        """Return the logits of this rank's tokens, whether each response's token is one of them,
        and its row if so.
        """
        logits: Array = self.embedding[tokens_before(rollout)] @ self.head.T
        tokens: Tokens = rollout["tokens"]
        is_here = (self.first <= tokens) & (tokens < self.first + self.num_tokens)
        return logits, is_here, np.where(is_here, tokens - self.first, 0)

    @register({"dispatch_fn": rows_over_dp, "collect_fn": reduce_log_probs})
    def log_probs(self, rollout: Batch) -> Batch:
        """Return ``log_probs`` of the responses' tokens and the softmax's ``normalizer``."""
        self.note("log_probs", rollout)
        logits, is_here, row = self._logits(rollout)
        return Batch(
            {
                "normalizer": log_sum_exp(logits),
                "chosen": np.where(is_here, picked(logits, row), 0.0),
            }
        )

    @register({"dispatch_fn": rows_over_dp, "collect_fn": reduce_gradient})
    def gradient(self, batch: Batch) -> Array:
        """Return the gradient of PPO's clipped loss, summed over tokens, for this rank's rows of
        the head.
        """
        self.note("gradient", batch)
        logits, is_here, row = self._logits(batch)
        ratio, advantages = np.exp(batch["log_probs"] - batch["old_log_probs"]), batch["advantages"]
        is_clipped = np.where(advantages > 0, ratio > 1 + CLIP, ratio < 1 - CLIP)
        weight = np.where(is_clipped, 0.0, ratio * advantages)[..., None]
        chosen = np.eye(self.num_tokens)[row] * is_here[..., None]
        by_logit = -weight * (chosen - np.exp(logits - batch["normalizer"][..., None]))
        total: Array = np.einsum("ntv,ntw->vw", by_logit, self.embedding[tokens_before(batch)])
        return total

    @register(AxisSharding(shard=("tp",), replicate=("dp",)), shard=("gradient",))
    def apply(self, gradient: Array) -> None:
        """Take a step of gradient descent; ``gradient`` has a row for each token, and each rank
        gets its own rows.
        """
        self.head = self.head - self.learning_rate * gradient

    @register(AxisSharding(shard=("tp",), replicate=()))
    def weights(self) -> Batch:
        """Return the head with a row for each token, joined over tp, from one dp rank."""
        return Batch({"head": self.head})

    @register(Dispatch.DP_MP_DISPATCH_FIRST, remainder="uneven", collect=Collect.LIST)
    def statistics(self, batch: Batch | None) -> dict[str, float] | None:
        """Return sums over the tokens of a share; only one rank of each dp coordinate receives
        it.
        """
        self.note("statistics", batch)
        if batch is None:
            return None
        ratio = np.exp(batch["log_probs"] - batch["old_log_probs"])
        return {
            "tokens": float(ratio.size),
            "clipped": float((np.abs(ratio - 1) > CLIP).sum()),
            "kl": float((batch["old_log_probs"] - batch["reference_log_probs"]).sum()),
        }


# --- the others -----------------------------------------------------------------------------------


class ActorInfer(Role):
    """Samples responses with the latest weights, which each rank has whole."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.embedding = embedding(seed)
        self.head = np.zeros((0, WIDTH))

    @register(Dispatch.ONE_TO_ALL)
    def load(self, weights: Batch) -> None:
        """Take new weights."""
        self.head = weights["head"]

    @register(Dispatch.DP_MP_COMPUTE, shard=("prompts",), remainder="pad")
    def generate(self, prompts: Batch, step: int, temperature: float) -> Batch:
        """Return ``tokens`` and their ``old_log_probs``; each row has a random stream of its own,
        so results do not depend on its rank.
        """
        self.note("generate", prompts)
        streams = [np.random.default_rng([self.seed, step, row]) for row in prompts["row"]]
        noise = np.stack([stream.gumbel(size=(LENGTH, VOCABULARY)) for stream in streams])
        token: Tokens = prompts["prompt"]
        tokens, log_probs = [], []
        for position in range(LENGTH):
            logits = self.embedding[token] @ self.head.T
            token = np.argmax(logits + temperature * noise[:, position], axis=-1)
            tokens.append(token)
            log_probs.append(picked(logits, token) - log_sum_exp(logits))
        return prompts.with_columns(
            tokens=np.stack(tokens, axis=1), old_log_probs=np.stack(log_probs, axis=1)
        )

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def checkpoint(self) -> Array:
        """Return the whole head, from one rank."""
        return self.head


class Reference(Role):
    """The initial actor, in two pipeline stages: the embedding and the head."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.layer = (
            embedding(seed) if self.rank_info.is_pipeline_first_stage else initial_head(seed)
        )

    @register(AxisSharding(shard=("dp",), replicate=()), remainder="uneven")
    def embed(self, rollout: Batch | None) -> Batch | None:
        """Return ``hidden`` (N, LENGTH, WIDTH) from the first stage; only it receives the rows."""
        self.note("embed", rollout)
        return None if rollout is None else Batch({"hidden": self.layer[tokens_before(rollout)]})

    @register(Dispatch.DP_MP_COMPUTE, remainder="uneven")
    def log_probs(self, rollout: Batch, hidden: Batch) -> Batch | None:
        """Return ``reference_log_probs`` from the last stage."""
        self.note("log_probs", rollout)
        if not self.rank_info.is_pipeline_last_stage:
            return None
        logits = hidden["hidden"] @ self.layer.T
        return Batch(
            {"reference_log_probs": picked(logits, rollout["tokens"]) - log_sum_exp(logits)}
        )


class Critic(Role):
    """Estimates the coming reward from the previous token and the position."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.table = np.zeros((VOCABULARY, LENGTH))

    @register(Dispatch.DP_MP_COMPUTE)
    def values(self, rollout: Batch) -> Batch:
        """Return ``values``."""
        self.note("values", rollout)
        return Batch({"values": self.table[tokens_before(rollout), np.arange(LENGTH)]})

    @register(Dispatch.DP_MP_COMPUTE, collect=Collect.LIST)
    def fit(self, batch: Batch) -> dict[str, float]:
        """Move the estimates towards the mean of ``returns``; returns the squared error before."""
        self.note("fit", batch)
        at = (tokens_before(batch), np.broadcast_to(np.arange(LENGTH), batch["tokens"].shape))
        error = batch["returns"] - self.table[at]
        total, count = np.zeros_like(self.table), np.zeros_like(self.table)
        np.add.at(total, at, error)
        np.add.at(count, at, 1.0)
        self.table += 0.5 * total / np.maximum(count, 1.0)
        return {"error": float((error**2).mean())}


class Reward(Role):
    """Scores responses by the rule."""

    @register(Dispatch.DP_MP_COMPUTE, remainder="uneven")
    def score(self, rollout: Batch) -> Batch:
        """Return ``rewards``: 1 for each token that counts on from the previous one."""
        self.note("score", rollout)
        is_right = rollout["tokens"] == (tokens_before(rollout) + STRIDE) % VOCABULARY
        return Batch({"rewards": is_right.astype(np.float64)})
