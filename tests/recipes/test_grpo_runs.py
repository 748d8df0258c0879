"""Test runs of the GRPO recipe: in this process on the inline scheduler, and on local workers that
are killed. tests/nightly/recipes has the runs on Ray, asynchronous and colocated runs.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys

import pytest

from tests.recipes.processes import finish, marked, num_steps, wait_for
from tests.recipes.runs import TWO_STEPS, Runs, lines

pytestmark = pytest.mark.timeout(400)

# --- in this process ------------------------------------------------------------------------------


def test_grpo_resume_equals_unbroken(runs: Runs) -> None:
    """Dynamic sampling draws a number of prompts that is not known in advance."""
    flags = shlex.split(
        "--algorithm.preset dapo --algorithm.overlong_filter false --train.minibatches 2 "
        "--samples_per_prompt 2 --rollout.max_new_tokens 3 --train.lr_schedule cosine --steps 6 "
        "--checkpoints.every 4"
    )
    assert runs.here("whole", *flags) == 0
    whole = runs.metrics("whole")
    assert sum(each.get("groups/filtered", 0) for each in whole[1:4]) > 0

    # A run that was killed after step 5 has no checkpoint since step 4.
    cut = runs.folder / "cut"
    (runs.folder / "whole").rename(cut)
    (cut / "checkpoints" / "step-000006").rename(runs.folder / "elsewhere")
    assert runs.here("cut", *flags, "--resume") == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (cut / "model").iterdir()
    }
    found = runs.metrics("cut")
    assert [each["step"] for each in found] == list(range(7))
    assert found[:5] == whole[:5]
    names = ["loss", "reward/mean", "groups/filtered", "epoch", "lr", "response_length/mean"]
    for ours, theirs in zip(found[5:], whole[5:], strict=True):
        assert ours is not theirs
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], abs=2e-4), (ours["step"], name)


def test_grpo_resume_unreadable_files(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    out = runs.folder / "out"
    assert runs.here("out", *TWO_STEPS, "--sync.way", "disk", "--check-weights") == 0
    assert len(lines(out / "checks.jsonl")) == 2
    (out / "checkpoints" / "latest" / "draws.json").write_text("{")
    assert runs.here("out", *TWO_STEPS, "--steps", "3", "--resume") == 1
    assert re.search(
        r"CheckpointError: .*step-000002: draws.json: .* Remove it", capsys.readouterr().err
    )
    (out / "metrics.jsonl").write_text("nonsense\n" * 2)
    assert runs.here("out", *TWO_STEPS, "--steps", "3", "--resume") == 2
    assert "metrics.jsonl is not the record of a run" in capsys.readouterr().err


def test_grpo_check_weights_difference(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    flags = shlex.split("--check-weights --sync.dtype bfloat16 --check.tolerance 1e-4")
    assert runs.here("out", *TWO_STEPS, *flags) == 1
    printed = capsys.readouterr().err
    assert "WeightsDifferError: rollout/" in printed
    assert "and the trainer differ after the update to weight version 1" in printed
    assert "above check.tolerance, 0.0001" in printed


def test_grpo_plan_starts_nothing(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.here("out", "--plan", "--cluster.scheduler", "local") == 0
    printed = capsys.readouterr().out
    assert "92 prompts to train on, 8 held out" in printed
    assert printed.rstrip().splitlines()[-1].startswith("rollout  0")
    assert not (runs.folder / "out").exists()


def test_grpo_nothing_to_learn(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    exact = ("--rewards", '[{"use": "exact", "on_cluster": true}]')
    dapo = shlex.split("--algorithm.preset dapo --algorithm.max_filtered_batches 2")
    assert runs.here("out", *exact, *dapo) == 1
    assert capsys.readouterr().err.startswith(
        "NothingToLearnError: dynamic sampling discarded 9 prompts in a row"
    )


# --- in processes ---------------------------------------------------------------------------------


def test_grpo_workers_killed(runs: Runs) -> None:
    """A rollout instance and a train worker are killed; every step is recorded once and has the
    values of a quiet run.
    """
    flags = shlex.split("--steps 6 --checkpoints.every 2 --checkpoints.in_background true")
    assert runs.here("quiet", *flags) == 0
    process = runs.start("out", *flags, "--cluster.train_workers", "2")
    _, num_killed = finish(process, runs.folder / "out", [("rollout", 1), ("train", 3)])
    assert num_killed == 2
    found, quiet = runs.metrics("out"), runs.metrics("quiet")
    assert [each["step"] for each in found] == list(range(7))
    for ours, theirs in zip(found[1:], quiet[1:], strict=True):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6), ours["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-4), ours["step"]
    assert found[-1]["weight_version"] > 6, "versions of lost steps are not given again"


def test_command_grpo_interrupted(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """The user types the command with a configuration of the package, and presses Ctrl-C."""
    out, mark = runs.folder / "out", f"interrupted-{os.getpid()}"
    process = runs.start(
        "out",
        *("--steps", "100000", "--checkpoints.every", "1"),
        program=[sys.executable, "-m", "helmsman", "grpo", "--config", "cpu_smoke"],
        cwd=runs.folder,
        env={**os.environ, "MARK": mark},
        start_new_session=True,
    )
    try:
        wait_for(lambda: process.poll() is not None or num_steps(out) > 2, 120.0)
        assert process.poll() is None, process.stdout and process.stdout.read()
        # A terminal sends the signal of Ctrl-C to all processes of the group.
        os.killpg(process.pid, signal.SIGINT)
        printed, _ = process.communicate(timeout=60.0)
    finally:
        process.kill()
    assert process.returncode == 130, printed
    assert "--resume" in printed
    wait_for(lambda: not marked(mark), 10.0)
    assert marked(mark) == []
    assert runs.here("out") == 2
    assert "has an earlier run (" in capsys.readouterr().err
