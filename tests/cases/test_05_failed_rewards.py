"""Rewards that fail, time out, lose their process or return other values than numbers."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from helmsman.api.plain import finite
from helmsman.recipes import GRPO, PPO, RunSummary
from helmsman.recipes.failures import RewardFailedError
from helmsman.recipes.rewards import GIVEN, make_caller
from helmsman.recipes.settings import Reward

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = [{"prompt": f"{number}=", "number": number} for number in range(10)]
NAN = float("nan")


def digits(completions: list[str]) -> list[float]:
    """Return the share of digits; a random model gets some of it."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


def fails(completions: list[str], number: list[int]) -> list[float]:
    """Fail for one of two answers to row 1, and in another way for all answers to rows 2 to 4."""
    match number[0]:
        case 1:
            return [NAN, *digits(completions)[1:]]
        case 2:
            raise RuntimeError("the judge is down")
        case 3:
            os._exit(7)
        case 4:
            threading.Event().wait()
    return digits(completions)


def nan_for_one(completions: list[str], number: list[int]) -> list[float]:
    found = digits(completions)
    return [NAN, *found[1:]] if number[0] == 1 else found


def raises_for_three(completions: list[str], number: list[int]) -> list[float]:
    assert number[0] > 2, "the judge is down"
    return digits(completions)


Train = Callable[..., tuple[RunSummary, list[dict[str, Any]]]]


@pytest.fixture
def train(model: str, tmp_path: Path) -> Train:
    """Run a recipe on ten rows, each once in a step; returns the summary and the metrics."""

    def run(reward: Any, *, recipe: Any = GRPO, **settings: Any) -> Any:
        made = recipe(
            model,
            settings.pop("data", ROWS),
            {"processes": 1, **(reward if isinstance(reward, dict) else {"use": reward})},
            **{
                "cluster": {"scheduler": "inline"},
                "rollout": {"max_new_tokens": 4},
                "evaluation": {"every": 0},
                "checkpoints": {"export": "none"},
                "steps": 1,
                "prompts_per_step": 10,
                "samples_per_prompt": 2,
                "train": {"lr": 1e-3},
                "out": str(tmp_path / "out"),
                **settings,
            },
        )
        return made.train(), _lines(tmp_path / "out" / "metrics.jsonl")[1:]

    return run


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- runs -------------------------------------------------------------------------------------


def test_failures_are_left_out(
    train: Train,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"prompt": f"{number}=", "number": number} for number in range(40)]
    summary, (found,) = train({"use": fails, "timeout_s": 2.0}, data=rows, prompts_per_step=40)
    assert (found["reward/failed"], found["groups/failed"]) == (7, 4)
    assert found["reward/mean"] > 0
    assert found["num_tokens"] > 0
    assert (summary.num_failed, summary.num_groups_failed) == (7, 4)
    path = tmp_path / "out" / "failures.jsonl"
    printed = f"failed:  rewards of 7 answers, 4 prompts left out; causes in {path}"
    assert printed in capsys.readouterr().out
    causes = {each["prompt"][6]: each["cause"] for each in _lines(path)}
    nan = (
        "returned nan; expected a finite number, a mapping with 'score', or None where the reward "
        "does not apply"
    )
    assert causes["1"] == nan
    assert "raised RuntimeError: the judge is down" in causes["2"]
    assert "in fails" in causes["2"], "the traceback"
    assert "has no result and was not repeated, because its worker exited" in causes["3"]
    assert "(limit 2 s, RewardPool's timeout)" in causes["4"]
    warned = [each.message for each in caplog.records if each.name.endswith("recipes.failures")]
    assert len(warned) == 4
    assert (
        f"the reward 'fails' failed (the batch of step 1, prompt '1='): {nan}. Answers left out: 1"
    ) in warned
    assert any(each.endswith("the judge is down. Answers left out: 2") for each in warned)


def test_failure_value(train: Train) -> None:
    """A value has no limit, and is weighted as the reward."""
    given = {"use": raises_for_three, "on_failure": "value", "failure_value": -3.0, "weight": 2.0}
    summary, (found,) = train(given)
    assert (found["reward/failed"], found["groups/failed"], summary.num_failed) == (6, 0, 6)
    assert (found["reward/min"], found["reward/max"] >= 0) == (-6.0, True)


def test_on_failure_raise(train: Train) -> None:
    message = (
        r"the reward 'raises_for_three' failed \(the batch of step 1, prompt '\d='\): (?s:.*)"
        r" raised AssertionError: the judge is down(?s:.*)in raises_for_three(?s:.*)expected a "
        r"number, as its on_failure is 'raise'. Correct the reward, or set on_failure to 'drop' or "
        "'value'."
    )
    with pytest.raises(RewardFailedError, match=message):
        train({"use": raises_for_three, "on_failure": "raise"})


def test_more_than_a_tenth(train: Train, tmp_path: Path) -> None:
    """Dynamic sampling does not replace the prompts, so that their failures are counted."""
    path = tmp_path / "out" / "failures.jsonl"
    message = (
        r"rewards failed \(the batch of step 1\): 20 of 20 answers have no reward, expected at "
        r"most a tenth. Correct the reward, raise its timeout_s, or set its on_failure to 'value'; "
        rf"{re.escape(str(path))} has all causes. The first, of the reward 'raises_for_three': "
        r"(?s:.*) raised AssertionError: the judge is down"
    )
    rows = [{**row, "number": 0} for row in ROWS]
    with pytest.raises(RewardFailedError, match=message):
        train(raises_for_three, algorithm={"preset": "dapo"}, data=rows)
    assert len(_lines(path)) == 20


def test_critic_needs_no_group(train: Train) -> None:
    _, (found,) = train(nan_for_one, recipe=PPO)
    assert (found["reward/failed"], found["groups/failed"]) == (1, 0)


def test_evaluation_leaves_failed_answers_out(train: Train) -> None:
    """The greedy and the sampled answer to row 1 have no reward, and the others are right."""
    summary, (found,) = train(
        nan_for_one,
        data={"train": ROWS[4:6], "held_out": [{**row, "prompt": "="} for row in ROWS]},
        evaluation={"every": 1, "at_start": False, "right_from": 0.0},
        prompts_per_step=2,
    )
    assert (found["eval/greedy_accuracy"], found["eval/pass@1"]) == (1.0, 1.0)
    assert found["eval/reward/failed"] == summary.num_failed == 2


def test_resumed_run_equals_unbroken(train: Train, tmp_path: Path) -> None:
    checkpoints = {"every": 2, "export": "none"}
    out = tmp_path / "out"
    _, whole = train(nan_for_one, steps=4, checkpoints=checkpoints)
    causes = (out / "failures.jsonl").read_text()
    assert [each["step"] for each in _lines(out / "failures.jsonl")] == [1, 2, 3, 4]
    # A run that was killed after step 4 has no checkpoint since step 2.
    (out / "checkpoints" / "step-000004").rename(tmp_path / "elsewhere")
    summary, found = train(nan_for_one, steps=4, checkpoints=checkpoints, resume=True)
    assert (out / "failures.jsonl").read_text() == causes
    assert summary.num_failed == 4
    for ours, theirs in zip(found, whole, strict=True):
        for name in ("reward/mean", "reward/failed", "groups/failed", "loss"):
            assert ours[name] == pytest.approx(theirs[name], abs=2e-4), name


# --- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        *(1, 1.0, True, Decimal(1), Fraction(2, 2)),
        *(np.float64(1), np.float32(1), np.float16(1), np.longdouble(1), np.int8(1), np.uint64(1)),
        *(np.bool_(True), np.array(1.0), np.array([1.0]), np.array([[True]]), np.ma.array(1.0)),
        *(torch.tensor(1.0), torch.tensor([1.0]), torch.tensor(True), torch.tensor([[1]])),
        torch.tensor(1.0, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.tensor(1.0)),
        pd.Series([1.0]),
    ],
)
def test_scalars_are_numbers(value: Any) -> None:
    assert finite(value) == 1.0
    assert type(finite(value)) is float


@pytest.mark.parametrize(
    "value",
    [
        *("1", b"1", "nan", np.str_("1"), None, [1.0], (1.0,), {1.0}, {}, 1j, object()),
        *(NAN, float("inf"), Decimal("NaN"), Decimal("sNaN"), 10**400, Decimal("1e999")),
        *(np.float32("nan"), np.float64("-inf"), np.array([1.0, 2.0]), np.array([]), np.array("1")),
        *(np.complex64(1), np.datetime64("2026-01-01"), np.timedelta64(1, "s"), pd.NA, pd.NaT),
        *(torch.tensor([1.0, 2.0]), torch.tensor(NAN), torch.tensor([]), torch.tensor(1j)),
    ],
)
def test_other_values_are_no_numbers(value: Any) -> None:
    assert finite(value) is None


def call(function: Callable[..., Any]) -> list[Any]:
    """Call a reward that takes batches for two answers."""
    caller = make_caller(Reward(use="m:f"), {"m:f": function})
    return caller([dict.fromkeys(GIVEN) | {"row": {}, "token_ids": []}] * 2)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "returned",
    [
        *([0.5, 1], (0.5, 1), iter([0.5, 1]), (each for each in (0.5, 1)), {0: 0.5, 1: 1}.values()),
        *(np.array([0.5, 1]), np.array([[0.5], [1]]), np.array([0.5, 1], dtype=object)),
        *(torch.tensor([0.5, 1]), torch.tensor([[0.5], [1]]), torch.tensor([0.5, 1]).bfloat16()),
        *(pd.Series([0.5, 1], index=[7, 8]), {"rewards": torch.tensor([0.5, 1])}),
        *([torch.tensor(0.5), np.float32(1)], [{"score": np.float64(0.5)}, Decimal(1)]),
    ],
)
def test_values_of_a_batch(returned: Any) -> None:
    found = call(lambda completions: returned)
    assert found == [0.5, 1.0]
    assert {type(each) for each in found} == {float}


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ([1.0], "1 values, [1.0]"),
        ([], "0 values, []"),
        ([1.0] * 3, "3 values, [1.0, 1.0, 1.0]"),
        (np.ones(3), "3 values, array([1., 1., 1.])"),
        (torch.ones(1), "1 values, tensor([1.])"),
        (torch.tensor(1.0), "tensor(1.)"),
        (np.float64(1), "np.float64(1.0)"),
        (1.0, "1.0"),
        (None, "None"),
        ("12", "'12'"),
        ({0: 1.0, 1: 1.0}, "{0: 1.0, 1: 1.0}"),
        ({"rewards": [1.0]}, "1 values, {'rewards': [1.0]}"),
        ({1.0, 2.0}, "{1.0, 2.0}"),
    ],
)
def test_wrong_counts_of_a_batch(returned: Any, shown: str) -> None:
    message = (
        f"the reward 'm:f' returned {shown}, for 2 completions; expected a list of 2 numbers, one "
        "per completion"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        call(lambda completions: returned)


def test_one_value_of_a_batch_is_no_number() -> None:
    good, bad = call(lambda completions: [1.0, "good"])
    assert good == 1.0
    assert isinstance(bad, ValueError)
    assert str(bad).startswith("returned 'good'; expected a finite number, a mapping with 'score'")
