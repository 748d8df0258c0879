"""Test the samples that the critic receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from helmsman import TrainController
from helmsman.recipes.critic import CriticModel
from tests.unit.recipes.data import settings


class Ranks(TrainController):
    """Keeps the samples in place of training on them."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def train_batch(self, samples: Sequence[Any], *_: Any, **__: Any) -> dict[str, float]:
        self.received += samples
        return {"loss": 1.0}


def test_columns_of_the_policy_are_left_out() -> None:
    """A teacher's columns have k entries for each token."""
    ranks, own = Ranks(), {"input_ids": [1], "loss_mask": [1], "values": [0.0], "returns": [1.0]}
    of_policy = {"top_ids": [[1, 2]], "top_logprobs": [[0.0, -1.0]], "logprobs": [0.0]}
    found = CriticModel(ranks, settings()).train([{**own, **of_policy}])
    assert (found, ranks.received) == ({"critic/loss": 1.0}, [own])
