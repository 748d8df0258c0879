"""Test runs of the GRPO and PPO recipes on Ray, asynchronous, colocated, and with kills."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from pathlib import Path

import pytest

from tests.recipes.processes import finish, num_steps, pids_of, wait_for
from tests.recipes.runs import Runs, require_served_weights, run, write_reward

pytestmark = pytest.mark.timeout(400)


def test_grpo_ray_weights_of_every_instance(given: tuple[Path, Path], tmp_path: Path) -> None:
    out, model = tmp_path / "out", given[0]
    flags = shlex.split(
        "--check-weights --train.lr 1e-3 --steps 3 --evaluation.every 2 --evaluation.samples 2 "
        "--evaluation.k [1,2] --checkpoints.every 1 --checkpoints.keep 4 --checkpoints.export all"
    )
    printed = run(*given, out, "--rewards", write_reward(tmp_path), *flags)
    assert "rollout  1" in printed
    assert require_served_weights(out, num_instances=2, steps=3) < 1e-3
    metrics = Runs(*given, tmp_path).metrics("out")
    steps = list(range(4))
    assert [each["step"] for each in metrics] == steps
    assert [each["weight_version"] for each in metrics] == steps
    names = (
        "reward/mean loss grad_norm clip_fraction response_length/mean tokens_per_second "
        "time/generate time/logprobs time/train time/sync time/check time/step"
    )
    for each in metrics[1:]:
        assert each["logprob_diff/mean"] <= each["logprob_diff/max"] < 1e-3
        assert set(names.split()) <= each.keys()
    assert {"eval/greedy_accuracy", "eval/pass@2", "eval/small/pass@1"} <= metrics[2].keys()
    assert sorted(path.name for path in (out / "evaluations").iterdir()) == [
        f"step-{step:06d}.json" for step in (0, 2, 3)
    ]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    last = out / "checkpoints" / "latest" / "model"
    exported = AutoModelForCausalLM.from_pretrained(last)
    AutoTokenizer.from_pretrained(last)
    first = AutoModelForCausalLM.from_pretrained(model)
    assert not exported.lm_head.weight.equal(first.lm_head.weight)


def test_grpo_asynchronous_reference_killed_twice(runs: Runs) -> None:
    """The second death comes while the reference is rebuilt; rollouts are partial, and the old
    log-probabilities are those of the trainer.
    """
    out = runs.folder / "out"
    flags = shlex.split(
        "--rollout.staleness 1 --rollout.oversample 1.5 --sync.in_flight abort "
        "--sync.way collective --algorithm.kl_coef 0.01 --algorithm.old_logprobs trainer "
        "--cluster.train_workers 2 --steps 6"
    )
    process = runs.start("out", *flags)
    try:
        wait_for(lambda: process.poll() is not None or num_steps(out) > 1, 120.0)
        victims = set(pids_of("reference", out))
        os.kill(min(victims), signal.SIGKILL)
        wait_for(
            lambda: process.poll() is not None or set(pids_of("reference", out)) - victims, 120.0
        )
        for victim in set(pids_of("reference", out)) - victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        printed, _ = finish(process, out)
    finally:
        process.kill()
    assert "a rank of reference was lost; all its ranks are rebuilt" in printed
    found = runs.metrics("out")
    assert [each["step"] for each in found] == list(range(7)), "no step was done again"
    assert max(each["staleness/max"] for each in found[1:]) == 1
    for each in found[1:]:
        assert each["kl"] >= 0
        assert "time/reference" in each
        assert each["ratio"] == pytest.approx(1.0, abs=1e-3), "the trainer's are the old ones"


def test_grpo_asynchronous_workers_killed(runs: Runs) -> None:
    """Every step is recorded once, and no answer is older than the staleness allows."""
    flags = shlex.split("--rollout.staleness 1 --steps 8 --checkpoints.every 2")
    process = runs.start("out", *flags, "--cluster.train_workers", "2")
    kills = [("rollout", 1), ("train", 3), ("rollout", 5)]
    assert finish(process, runs.folder / "out", kills)[1] >= 2
    found = runs.metrics("out")
    assert [each["step"] for each in found] == list(range(9))
    assert all(each["staleness/max"] <= 1 for each in found[1:])
    versions = [each["weight_version"] for each in found]
    assert versions == sorted(set(versions))


def test_grpo_colocated_equals_separated(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles sleep and wake in turn on devices that are numbers here."""
    flags = shlex.split("--steps 2 --checkpoints.every 2 --evaluation.every 2")
    assert runs.here("separated", *flags) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    # The reference takes its turn, too, and a weight of 1e-9 does not change the result.
    shared = shlex.split(
        "--cluster.placement colocated --cluster.devices_per_node 1 "
        "--cluster.env_vars.HELMSMAN_PLATFORM cpu --algorithm.kl_coef 1e-9 --check-weights"
    )
    process = runs.start("colocated", *flags, *shared)
    printed, _ = finish(process, runs.folder / "colocated")
    assert "rollout (beside train)" in printed
    separated, colocated = runs.metrics("separated"), runs.metrics("colocated")
    assert [each["step"] for each in colocated] == [0, 1, 2]
    for ours, theirs in zip(colocated[1:], separated[1:], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-4)
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6)
        assert ours["time/hand_over"] > 0
        assert "time/reference" in ours
        assert ours["check/max_diff"] < 1e-3


def test_ppo_critic_killed(runs: Runs) -> None:
    """The run continues from its last checkpoint, which has both models, as a quiet run does."""
    flags = shlex.split("--algorithm.preset ppo --steps 5 --checkpoints.every 2")
    finish(runs.start("quiet", *flags), runs.folder / "quiet")
    process = runs.start("out", *flags)
    printed, num_killed = finish(process, runs.folder / "out", [("critic", 3)])
    assert num_killed == 1
    assert "critic/0 was lost" in printed
    found, quiet = runs.metrics("out"), runs.metrics("quiet")
    assert [each["step"] for each in found] == list(range(6))
    for ours, theirs in zip(found[1:], quiet[1:], strict=True):
        for name in ("reward/mean", "critic/loss", "loss"):
            assert ours[name] == pytest.approx(theirs[name], abs=2e-4), (ours["step"], name)


def test_teacher_on_devices_of_its_own(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, which do not sleep in turns, judge one answer per prompt as one beside does; one
    that dies is rebuilt.
    """
    flags = shlex.split(
        "--steps 4 --rewards [] --samples_per_prompt 1 --cluster.placement colocated "
        f"--cluster.env_vars.HELMSMAN_PLATFORM cpu --algorithm.teacher {runs.model} "
        "--algorithm.teacher_top_k 4"
    )
    found = []
    for devices, workers in (("0", "0"), ("0,1,2", "2")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        more = ["--algorithm.teacher_workers", workers, "--train.minibatches", "2"]
        process = runs.start(f"out{workers}", *flags, *more)
        kills = [("teacher", 2)] if workers == "2" else []
        printed, num_killed = finish(process, runs.folder / f"out{workers}", kills)
        assert num_killed == len(kills)
        assert ("teacher (beside train)" in printed) == (workers == "0")
        found.append(runs.metrics(f"out{workers}")[1:])
    for one, other in zip(*found, strict=True):
        assert one["teacher/kl"] == pytest.approx(other["teacher/kl"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    assert found[0][-1]["grad_norm"] > 0
