"""Test runs that record their rollouts, and runs that are fed from them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from helmsman.recipes.recorded import find_parts
from tests.recipes.processes import num_steps
from tests.recipes.runs import TWO_STEPS, Runs

pytestmark = pytest.mark.timeout(400)

FOUR_STEPS = [*TWO_STEPS, *shlex.split("--steps 4 --checkpoints.every 2")]
OTHERWISE = ("time/", "sync/", "eval/", "tokens_per_second")
"""Metrics of a run with instances, or of durations."""


async def talk_twice(session: Any) -> float:
    """Ask the model twice; the first answer has a reward of its own."""
    messages: list[Any] = [{"role": "user", "content": "1"}]
    for turn in range(2):
        message = await session.complete(messages)
        session.set_turn_reward(turn, float(len(message.get("content") or "")))
        messages += [message, {"role": "user", "content": "2"}]
    return 1.0


def trained(runs: Runs, name: str) -> list[dict[str, Any]]:
    """Return the metrics that must be equal bit for bit."""
    steps = [row for row in runs.metrics(name) if row["step"]]
    assert all("loss" in row for row in steps)
    return [
        {key: value for key, value in row.items() if not key.startswith(OTHERWISE)} for row in steps
    ]


def replay(source: Path) -> list[str]:
    return ["--rollout.engine", "recorded", "--rollout.recorded", str(source)]


def test_recorded_steps_give_the_same_losses(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dynamic sampling leaves prompts out; a resumed run reads its own recording."""
    dapo = "--algorithm.preset dapo --algorithm.overlong_filter false --evaluation.every 2"
    flags = [*FOUR_STEPS, *shlex.split(dapo)]
    assert runs.here("whole", *flags, "--rollout.record", "true") == 0
    whole, source = trained(runs, "whole"), runs.folder / "whole"
    assert [*find_parts(source)] == [1, 2, 3, 4]
    assert "rollouts: recorded in " in capsys.readouterr().out

    assert runs.here("again", *flags, *replay(source), "--plan") == 0
    printed = capsys.readouterr().out
    assert f"rollouts: those of {source}; without instances and evaluations" in printed
    assert printed.rstrip().splitlines()[-1].startswith("train")
    assert runs.here("again", *flags, *replay(source / "rollouts")) == 0
    assert trained(runs, "again") == whole
    assert not (runs.folder / "again" / "evaluations").exists()
    assert not (runs.folder / "again" / "rollouts").exists()

    (source / "checkpoints" / "step-000004").rename(runs.folder / "elsewhere")
    assert runs.here("whole", *flags, *replay(source), "--resume") == 0
    assert trained(runs, "whole") == whole
    assert [*find_parts(source)] == [1, 2, 3, 4]


def test_recording_refused_before_the_start(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*TWO_STEPS, "--rollout.record", "true"]
    assert runs.here("source", *flags) == 0
    source = runs.folder / "source"
    for more, message in (
        (["--steps", "3"], "which has no rollouts/step-000003.parquet; expected"),
        (["--data.num_held_out", "3"], "prompt_ids are those of"),
        (["--samples_per_prompt", "4"], "samples_per_prompt is 2, expected 4"),
        (
            ["--out", str(source), "--overwrite"],
            f"rollout.recorded {source} is inside the output folder {source}, which a new",
        ),
    ):
        assert runs.here("out", *TWO_STEPS, *replay(source), *more) == 2
        assert message in capsys.readouterr().err
    assert num_steps(source) == 3, "with step 0"
    assert num_steps(runs.folder / "out") == 0


@pytest.mark.parametrize(
    "flags",
    [
        "--algorithm.preset ppo --samples_per_prompt 1 --algorithm.kl_coef 0.1",
        "--correction.mode truncate --sync.dtype bfloat16 --algorithm.overlong_buffer 3",
        f"--agent.use {__name__}:talk_twice --rewards [] --agent.credit turn",
    ],
)
def test_recorded_algorithms(flags: str, runs: Runs) -> None:
    given = [*TWO_STEPS, *shlex.split(flags)]
    assert runs.here("source", *given, "--rollout.record", "true") == 0
    assert runs.here("again", *given, *replay(runs.folder / "source")) == 0
    assert trained(runs, "again") == trained(runs, "source")
