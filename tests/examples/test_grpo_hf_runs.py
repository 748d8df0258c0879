"""examples/grpo_hf.py as its user runs it, with Helmsman's own rollout engine. tests/vllm/test_grpo_hf.py does it with vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.hf_data import write_jsonl
from tests.examples.hf_runs import command, lines, require_served_weights, run, write_reward
from tests.examples.processes import marked, pids_of, wait_for
from tests.examples.tiny_model import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SMALL = (
    *("--cluster.scheduler", "local", "--cluster.train_workers", "1", "--cluster.rollout_instances", "1"),
    *("--evaluation.every", "0"),
)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A model, a file of prompts, and a reward."""
    folder = tmp_path_factory.mktemp("given")
    return make_model(folder / "model"), write_jsonl(folder / "sums.jsonl"), write_reward(folder)


@pytest.fixture
def start(given: tuple[Path, Path, str], tmp_path: Path) -> Callable[..., str]:
    model, data, rewards = given

    def begin(name: str, *flags: str) -> str:
        return run(model, data, tmp_path / name, *SMALL, "--rewards", rewards, "--train.lr", "1e-3", *flags)

    return begin


def test_ten_steps_on_ray_change_the_weights_of_every_instance(given: tuple[Path, Path, str], tmp_path: Path) -> None:
    model, data, rewards = given
    out = tmp_path / "out"
    flags = ("--check-weights", "--rewards", rewards, "--train.lr", "1e-3")
    kept = (
        "--checkpoints.every",
        "1",
        "--checkpoints.keep",
        "11",
        "--checkpoints.export",
        "all",
        "--evaluation.samples",
        "2",
        "--evaluation.k",
        "[1,2]",
    )
    said = run(model, data, out, *flags, *kept)
    assert "rollout  1" in said
    assert require_served_weights(out, num_instances=2, steps=10) < 1e-3
    metrics = lines(out / "metrics.jsonl")
    assert [each["step"] for each in metrics] == list(range(11))
    assert [each["weight_version"] for each in metrics] == list(range(11))
    for each in metrics[1:]:
        assert each["logprob_diff/mean"] <= each["logprob_diff/max"] < 1e-3
        assert {"reward/mean", "loss", "grad_norm", "clip_fraction", "response_length/mean", "tokens_per_second"} <= each.keys()
        assert {"time/generate", "time/logprobs", "time/train", "time/sync", "time/check", "time/step"} <= each.keys()
    assert metrics[-1]["reward/mean"] > metrics[1]["reward/mean"] + 0.1, "it has learnt to write digits"
    assert {"eval/greedy_accuracy", "eval/pass@2", "eval/small/pass@1"} <= metrics[10].keys()
    assert sorted(path.name for path in (out / "evaluations").iterdir()) == [f"step-{step:06d}.json" for step in (0, 5, 10)]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    last = out / "checkpoints" / "latest" / "model"
    exported = AutoModelForCausalLM.from_pretrained(last)
    AutoTokenizer.from_pretrained(last)
    first = AutoModelForCausalLM.from_pretrained(model)
    assert not exported.lm_head.weight.equal(first.lm_head.weight)


def test_instances_with_other_weights_end_the_run_with_a_message(given: tuple[Path, Path, str], tmp_path: Path) -> None:
    model, data, rewards = given
    flags = (*SMALL, "--rewards", rewards, "--check-weights")
    ran = subprocess.run(
        command(model, data, tmp_path / "out", *flags, "--sync.dtype", "bfloat16", "--check.tolerance", "1e-4"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "WeightsDifferError: rollout/" in ran.stderr
    assert "does not compute what the trainer does after the update to weight version 1" in ran.stderr
    assert "check.tolerance is 0.0001" in ran.stderr


DAPO = ("--algorithm.preset", "dapo", "--algorithm.overlong_filter", "false", "--train.minibatches", "2")


def test_a_run_that_goes_on_is_the_unbroken_one(start: Callable[..., str], tmp_path: Path) -> None:
    """With dynamic sampling, which uses a number of prompts that nobody knows before."""
    flags = (*DAPO, "--checkpoints.every", "2", "--samples_per_prompt", "2")
    flags = (*flags, "--rollout.max_new_tokens", "3", "--train.lr_schedule", "cosine")
    start("whole", *flags, "--steps", "6")
    whole = lines(tmp_path / "whole" / "metrics.jsonl")
    assert sum(each.get("groups/filtered", 0) for each in whole[1:4]) > 0

    # As a run is that was killed after step 5, without a checkpoint since step 4.
    start("cut", *flags, "--steps", "6", "--checkpoints.every", "4")
    cut = tmp_path / "cut"
    for later in cut.glob("checkpoints/step-000006"):
        later.rename(cut / "elsewhere")
    start("cut", *flags, "--steps", "6", "--resume")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (cut / "model").iterdir()}
    found = lines(cut / "metrics.jsonl")
    assert [each["step"] for each in found] == list(range(7))
    for ours, theirs in zip(found[1:], whole[1:], strict=True):
        for name in ("loss", "reward/mean", "groups/filtered", "epoch", "lr", "response_length/mean"):
            assert ours[name] == pytest.approx(theirs[name], abs=2e-4), (ours["step"], name)


def test_an_asynchronous_run_with_a_reference_and_partial_rollouts(start: Callable[..., str], tmp_path: Path) -> None:
    flags = (
        "--rollout.staleness",
        "1",
        "--rollout.oversample",
        "1.5",
        "--sync.in_flight",
        "recall",
        "--sync.way",
        "collective",
    )
    start("out", *flags, "--algorithm.kl_coef", "0.01", "--algorithm.old_logprobs", "trainer", "--steps", "5")
    metrics = lines(tmp_path / "out" / "metrics.jsonl")[1:]
    assert max(each["staleness/max"] for each in metrics) == 1
    assert all(each["kl"] >= 0 and "time/reference" in each for each in metrics)
    assert all(each["ratio"] == pytest.approx(1.0, abs=1e-3) for each in metrics), "its own log-probabilities are the old ones"


def test_roles_that_take_turns_on_their_devices_do_what_separate_ones_do(
    start: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The devices are numbers here; sleeping and waking, and their order, are real."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    flags = ("--steps", "3", "--algorithm.kl_coef", "0.01", "--checkpoints.every", "2", "--evaluation.every", "2")
    flags = (*flags, "--cluster.devices_per_node", "2", "--cluster.env_vars", '{"HELMSMAN_PLATFORM": "cpu"}')
    start("separated", *flags)
    said = start("colocated", *flags, "--cluster.placement", "colocated", "--check-weights")
    assert "rollout (beside train)" in said
    separated, colocated = (lines(tmp_path / name / "metrics.jsonl") for name in ("separated", "colocated"))
    assert [each["step"] for each in colocated] == [0, 1, 2, 3]
    for ours, theirs in zip(colocated[1:], separated[1:], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-4)
        assert ours["reward/mean"] == theirs["reward/mean"]
        assert ours["time/hand_over"] > 0
        assert ours["check/max_diff"] < 1e-3


def test_weights_by_files_and_a_plan_that_starts_nothing(start: Callable[..., str], tmp_path: Path) -> None:
    said = start("plan", "--plan")
    assert "92 prompts to train on, 8 held out" in said
    assert said.rstrip().splitlines()[-1].startswith("rollout  0")
    assert not (tmp_path / "plan" / "settings.json").exists()
    start("out", "--sync.way", "disk", "--steps", "2", "--check-weights")
    assert len(lines(tmp_path / "out" / "checks.jsonl")) == 2


def test_prompts_that_teach_nothing_end_the_run(given: tuple[Path, Path, str], tmp_path: Path) -> None:
    model, data, _ = given
    flags = (*SMALL, "--algorithm.preset", "dapo")
    ran = subprocess.run(
        command(model, data, tmp_path / "out", *flags, "--algorithm.max_filtered_batches", "2"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "NothingToLearnError: dynamic sampling has thrown away 9 prompts in a row" in ran.stderr


def test_an_interrupted_run_leaves_nothing_and_says_how_to_go_on(given: tuple[Path, Path, str], tmp_path: Path) -> None:
    model, data, rewards = given
    out, mark = tmp_path / "out", f"interrupted-{os.getpid()}"
    flags = (*SMALL, "--rewards", rewards, "--steps", "100000")
    process = subprocess.Popen(
        command(model, data, out, *flags),
        env={**os.environ, "MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: process.poll() is not None or _num_steps(out) > 6, 120.0)
        assert process.poll() is None, process.stdout and process.stdout.read()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal's Ctrl-C, which all processes of its group get
        said, _ = process.communicate(timeout=20.0)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "--resume" in said
    wait_for(lambda: not marked(mark), 10.0)
    assert marked(mark) == []


def _num_steps(out: Path) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_workers_that_die_do_not_end_the_run(given: tuple[Path, Path, str], start: Callable[..., str], tmp_path: Path) -> None:
    """A rollout instance and a train worker are killed; every step is recorded once and does what it does in a quiet run."""
    model, data, rewards = given
    flags = ("--cluster.train_workers", "2", "--steps", "9", "--checkpoints.every", "3", "--checkpoints.in_background", "true")
    start("quiet", *flags)
    out = tmp_path / "out"
    common = (*SMALL, "--rewards", rewards, "--train.lr", "1e-3", *flags)
    process = subprocess.Popen(command(model, data, out, *common), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    killed: list[int] = []
    try:
        for role, at in (("rollout", 2), ("train", 5)):
            wait_for(lambda at=at: process.poll() is not None or _num_steps(out) > at, 120.0)  # type: ignore[misc]
            if process.poll() is None:
                killed.append(pids_of(role, out)[-1])
                os.kill(killed[-1], signal.SIGKILL)
        said, _ = process.communicate(timeout=200.0)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert len(killed) == 2
    found, quiet = lines(out / "metrics.jsonl"), lines(tmp_path / "quiet" / "metrics.jsonl")
    assert [each["step"] for each in found] == list(range(10))
    for ours, theirs in zip(found[1:], quiet[1:], strict=True):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6), ours["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-4), ours["step"]
    assert found[-1]["weight_version"] > 9, "versions of steps that were lost are not given again"
