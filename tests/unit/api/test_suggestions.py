"""Test that messages about unknown names suggest the nearest known one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import msgspec
import pytest

from helmsman import ClusterConfig, RequestOptions
from helmsman.api.generation import SamplingParams
from helmsman.api.scheduler import Job, SchedulingSpec, SchedulingStrategy, Timeouts
from helmsman.api.suggestions import did_you_mean, nearest


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("gpus", ["cpu", "gpu", "mem"], "gpu"),
        ("num_gpus", ["cpu", "gpu", "mem"], "gpu"),
        ("learning_rate", ["eps", "lr", "seed"], "lr"),
        ("cliphigh", ["clip_low", "clip_high"], "clip_high"),
        ("max_tokens", ["max_new_tokens", "seed"], "max_new_tokens"),
    ],
)
def test_did_you_mean_nearest(name: str, known: list[str], expected: str) -> None:
    assert did_you_mean(name, known) == f"did you mean {expected!r}?"


def test_did_you_mean_without_a_near_name() -> None:
    assert did_you_mean("colour", ["lr", "eps"]) == "there are: lr, eps"
    assert did_you_mean("colour", []) == "there are: none"
    assert nearest("clip", ["clip_low", "clip_high", "seed"]) == ["clip_low", "clip_high"]


@pytest.mark.parametrize(
    ("kind", "field", "expected"),
    [
        (SchedulingSpec, "gpus", "gpu"),
        (SchedulingStrategy, "kind_of_type", "type"),
        (Job, "replica", "replicas"),
        (Timeouts, "start", "start_s"),
        (SamplingParams, "temprature", "temperature"),
        (ClusterConfig, "tp", "tp_size"),
        (RequestOptions, "deadline", "deadline_s"),
    ],
)
def test_suggesting_unknown_field(kind: type[msgspec.Struct], field: str, expected: str) -> None:
    with pytest.raises(
        TypeError,
        match=f"{kind.__name__} has no field {field!r}; (did you mean {expected!r}|there are: )",
    ):
        kind(**{field: 1})


def test_suggesting_pickles_copies_and_converts() -> None:
    spec = SchedulingSpec(gpu=2)
    others: list[Any] = [
        pickle.loads(pickle.dumps(spec)),
        copy.deepcopy(spec),
        msgspec.convert({"gpu": 2}, SchedulingSpec),
    ]
    assert others == [spec] * 3
    with pytest.raises(TypeError, match="required"):
        Job()  # type: ignore[call-arg]
