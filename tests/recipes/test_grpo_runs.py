"""the GRPO recipe as its user runs it, with Helmsman's own rollout engine. tests/vllm/test_grpo.py
does it with vLLM.

What does not need processes is run in this one, by `main` and the inline scheduler; what only
processes can meet comes last.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helmsman.recipes.tiny_model import make_model
from tests.recipes.processes import marked, pids_of, wait_for
from tests.recipes.runs import begin_here, command, lines, require_served_weights, run, write_reward
from tests.unit.recipes.data import write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PLAIN = ("--evaluation.every", "0", "--train.lr", "1e-3")
TWO_STEPS = (
    "--steps",
    "2",
    "--prompts_per_step",
    "2",
    "--samples_per_prompt",
    "2",
    "--rollout.max_new_tokens",
    "4",
)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A model, a file of prompts, and a reward."""
    folder = tmp_path_factory.mktemp("given")
    model = make_model(folder / "model", num_layers=2, width=64)
    return model, write_jsonl(folder / "sums.jsonl"), write_reward(folder)


@pytest.fixture
def begin(given: tuple[Path, Path, str], tmp_path: Path) -> Callable[..., int]:
    """Run it here, into a folder of that name; returns the exit code."""
    model, data, _ = given
    rewards = write_reward(tmp_path, on_cluster=True)
    return lambda name, *flags: begin_here(
        model, data, tmp_path / name, *PLAIN, "--rewards", rewards, *flags
    )


@pytest.fixture
def metrics(tmp_path: Path) -> Callable[[str], list[dict[str, Any]]]:
    return lambda name: lines(tmp_path / name / "metrics.jsonl")


# --- in this process ------------------------------------------------------------------------------

DAPO = (
    "--algorithm.preset",
    "dapo",
    "--algorithm.overlong_filter",
    "false",
    "--train.minibatches",
    "2",
)


def test_grpo_hf_resume_equals_unbroken(
    begin: Callable[..., int], metrics: Callable[[str], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """With dynamic sampling, which uses a number of prompts not known in advance."""
    flags = (
        *DAPO,
        "--samples_per_prompt",
        "2",
        "--rollout.max_new_tokens",
        "3",
        "--train.lr_schedule",
        "cosine",
    )
    flags = (*flags, "--steps", "6", "--checkpoints.every", "4")  # type: ignore[assignment]
    assert begin("whole", *flags) == 0
    whole = metrics("whole")
    assert sum(each.get("groups/filtered", 0) for each in whole[1:4]) > 0

    # As a run is that was killed after step 5, without a checkpoint since step 4.
    cut = tmp_path / "cut"
    (tmp_path / "whole").rename(cut)
    (cut / "checkpoints" / "step-000006").rename(tmp_path / "elsewhere")
    assert begin("cut", *flags, "--resume") == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (cut / "model").iterdir()
    }
    found = metrics("cut")
    assert [each["step"] for each in found] == list(range(7))
    assert found[:5] == whole[:5]
    for ours, theirs in zip(found[5:], whole[5:], strict=True):
        assert ours is not theirs
        for name in (
            "loss",
            "reward/mean",
            "groups/filtered",
            "epoch",
            "lr",
            "response_length/mean",
        ):
            assert ours[name] == pytest.approx(theirs[name], abs=2e-4), (ours["step"], name)


def test_grpo_hf_resume_unreadable_files(
    begin: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert begin("out", *TWO_STEPS) == 0
    draws, metrics = (
        tmp_path / "out" / "checkpoints" / "latest" / "draws.json",
        tmp_path / "out" / "metrics.jsonl",
    )
    draws.write_text("{")
    assert begin("out", *TWO_STEPS, "--steps", "3", "--resume") == 1
    assert re.search(
        r"CheckpointError: .*step-000002: draws.json: .* Remove it", capsys.readouterr().err
    )
    metrics.write_text("nonsense\n" * 2)
    assert begin("out", *TWO_STEPS, "--steps", "3", "--resume") == 2
    assert "metrics.jsonl is not the record of a run" in capsys.readouterr().err


def test_grpo_hf_check_weights_difference(
    begin: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        begin(
            "out",
            *TWO_STEPS,
            "--check-weights",
            "--sync.dtype",
            "bfloat16",
            "--check.tolerance",
            "1e-4",
        )
        == 1
    )
    said = capsys.readouterr().err
    assert "WeightsDifferError: rollout/" in said
    assert "and the trainer differ after the update to weight version 1" in said
    assert "above check.tolerance, 0.0001" in said


def test_grpo_hf_plan_starts_nothing(
    begin: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert begin("out", "--plan", "--cluster.scheduler", "ray") == 0
    said = capsys.readouterr().out
    assert "92 prompts to train on, 8 held out" in said
    assert said.rstrip().splitlines()[-1].startswith("rollout  0")
    assert not (tmp_path / "out").exists()
    assert begin("out", *TWO_STEPS, "--sync.way", "disk", "--check-weights") == 0
    assert len(lines(tmp_path / "out" / "checks.jsonl")) == 2


def test_grpo_hf_nothing_to_learn(
    begin: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    exact = ("--rewards", '[{"use": "exact", "on_cluster": true}]')
    assert (
        begin("out", *exact, "--algorithm.preset", "dapo", "--algorithm.max_filtered_batches", "2")
        == 1
    )
    assert capsys.readouterr().err.startswith(
        "NothingToLearnError: dynamic sampling discarded 9 prompts in a row"
    )


def test_grpo_hf_reward_raises(
    begin: Callable[..., int], metrics: Callable[[str], list[dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "picky.py").write_text(
        "def picky(completion, answer, num_tokens):\n"
        "    assert answer != '7'\n"
        "    return 1.0 if answer == '8' else float('nan') if answer == '9' else num_tokens / 100\n"
    )
    rewards = json.dumps(
        [{"use": f"{tmp_path / 'picky.py'}:picky", "on_cluster": True, "processes": 1}]
    )
    data = write_jsonl(
        tmp_path / "five.jsonl",
        [{"prompt": f"{each}=", "answer": str(each)} for each in range(5, 10)],
    )
    held_out = ("--data.num_held_out", "0", "--data.held_out", str(data), "--evaluation.every", "1")
    assert begin("out", "--rewards", rewards, "--data.train", str(data), *TWO_STEPS, *held_out) == 0
    found = metrics("out")
    assert [each["step"] for each in found] == [0, 1, 2]
    assert [(each["eval/greedy_accuracy"], each["eval/pass@1"]) for each in found] == [
        (0.2, 0.2)
    ] * 3
    assert [each["eval/reward/failed"] for each in found] == [4.0] * 3


# --- in processes ---------------------------------------------------------------------------------


def test_grpo_hf_ray_weights_of_every_instance(
    given: tuple[Path, Path, str], tmp_path: Path
) -> None:
    model, data, rewards = given
    out = tmp_path / "out"
    flags = (
        "--check-weights",
        "--rewards",
        rewards,
        "--train.lr",
        "1e-3",
        "--steps",
        "3",
        "--evaluation.every",
        "2",
    )
    kept = ("--checkpoints.every", "1", "--checkpoints.keep", "4", "--checkpoints.export", "all")
    said = run(
        model, data, out, *flags, *kept, "--evaluation.samples", "2", "--evaluation.k", "[1,2]"
    )
    assert "rollout  1" in said
    assert require_served_weights(out, num_instances=2, steps=3) < 1e-3
    metrics = lines(out / "metrics.jsonl")
    assert (
        [each["step"] for each in metrics]
        == [each["weight_version"] for each in metrics]
        == list(range(4))
    )
    for each in metrics[1:]:
        assert each["logprob_diff/mean"] <= each["logprob_diff/max"] < 1e-3
        assert {
            "reward/mean",
            "loss",
            "grad_norm",
            "clip_fraction",
            "response_length/mean",
            "tokens_per_second",
        } <= each.keys()
        assert {
            "time/generate",
            "time/logprobs",
            "time/train",
            "time/sync",
            "time/check",
            "time/step",
        } <= each.keys()
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


LOCAL = (
    "--cluster.scheduler",
    "local",
    "--cluster.train_workers",
    "1",
    "--cluster.rollout_instances",
    "1",
    *PLAIN,
)


def begin_run(
    given: tuple[Path, Path, str], out: Path, *flags: str, **options: Any
) -> subprocess.Popen[str]:
    """Start a run on a local scheduler in a process of its own."""
    model, data, rewards = given
    flags = (*LOCAL, "--rewards", rewards, *flags)
    return subprocess.Popen(
        command(model, data, out, *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def _num_steps(out: Path) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_grpo_hf_asynchronous_reference_killed_twice(
    given: tuple[Path, Path, str], metrics: Callable[[str], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Partial rollouts, a reference, and log-probabilities of the trainer; a second death while the
    reference is rebuilt.
    """
    out = tmp_path / "out"
    ahead = (
        "--rollout.staleness",
        "1",
        "--rollout.oversample",
        "1.5",
        "--sync.in_flight",
        "abort",
        "--sync.way",
        "collective",
    )
    reference = (
        "--algorithm.kl_coef",
        "0.01",
        "--algorithm.old_logprobs",
        "trainer",
        "--cluster.train_workers",
        "2",
    )
    process = begin_run(given, out, *ahead, *reference, "--steps", "6")
    try:
        wait_for(lambda: process.poll() is not None or _num_steps(out) > 1, 120.0)
        victims = set(pids_of("reference", out))
        os.kill(min(victims), signal.SIGKILL)
        wait_for(
            lambda: process.poll() is not None or set(pids_of("reference", out)) - victims, 120.0
        )
        for victim in set(pids_of("reference", out)) - victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        said, _ = process.communicate(timeout=200.0)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "a rank of the reference model was lost; all its ranks are rebuilt" in said
    assert [each["step"] for each in metrics("out")] == list(range(7)), "no step was done again"
    found = metrics("out")[1:]
    assert max(each["staleness/max"] for each in found) == 1
    assert all(each["kl"] >= 0 and "time/reference" in each for each in found)
    assert all(each["ratio"] == pytest.approx(1.0, abs=1e-3) for each in found), (
        "its own log-probabilities are the old ones"
    )


def test_grpo_hf_colocated_equals_separated(
    given: tuple[Path, Path, str],
    begin: Callable[..., int],
    metrics: Callable[[str], list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The devices are numbers here; sleeping and waking, and their order, are real."""
    flags = ("--steps", "2", "--checkpoints.every", "2", "--evaluation.every", "2")
    assert begin("separated", *flags) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    on_one = ("--cluster.placement", "colocated", "--cluster.devices_per_node", "1")
    shared = (*on_one, "--cluster.env_vars.HELMSMAN_PLATFORM", "cpu")
    model, data, rewards = given
    # it takes its turn, too, and does not change what is learned
    reference = (
        "--algorithm.kl_coef",
        "1e-9",
    )
    said = run(
        model,
        data,
        tmp_path / "colocated",
        *LOCAL,
        "--rewards",
        rewards,
        *flags,
        *shared,
        *reference,
        "--check-weights",
    )
    assert "rollout (beside train)" in said
    separated, colocated = metrics("separated"), metrics("colocated")
    assert [each["step"] for each in colocated] == [0, 1, 2]
    for ours, theirs in zip(colocated[1:], separated[1:], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-4)
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6)
        assert ours["time/hand_over"] > 0
        assert "time/reference" in ours
        assert ours["check/max_diff"] < 1e-3


def test_grpo_hf_interrupted(given: tuple[Path, Path, str], tmp_path: Path) -> None:
    out, mark = tmp_path / "out", f"interrupted-{os.getpid()}"
    flags = ("--steps", "100000", "--checkpoints.every", "1")
    process = begin_run(
        given, out, *flags, env={**os.environ, "MARK": mark}, start_new_session=True
    )
    try:
        wait_for(lambda: process.poll() is not None or _num_steps(out) > 2, 120.0)
        assert process.poll() is None, process.stdout and process.stdout.read()
        # as a terminal's Ctrl-C, which all processes of its group get
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=60.0)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "--resume" in said
    wait_for(lambda: not marked(mark), 10.0)
    assert marked(mark) == []


def test_grpo_hf_workers_killed(
    given: tuple[Path, Path, str],
    begin: Callable[..., int],
    metrics: Callable[[str], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    """A rollout instance and a train worker are killed; every step is recorded once and does what
    it does in a quiet run.
    """
    flags = ("--steps", "6", "--checkpoints.every", "2", "--checkpoints.in_background", "true")
    assert begin("quiet", *flags) == 0
    out = tmp_path / "out"
    process = begin_run(given, out, *flags, "--cluster.train_workers", "2")
    killed: list[int] = []
    try:
        for role, at in (("rollout", 1), ("train", 3)):
            wait_for(lambda at=at: process.poll() is not None or _num_steps(out) > at, 120.0)  # type: ignore[misc]
            if process.poll() is None:
                killed.append(pids_of(role, out)[-1])
                os.kill(killed[-1], signal.SIGKILL)
        said, _ = process.communicate(timeout=200.0)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert len(killed) == 2
    found, quiet = metrics("out"), metrics("quiet")
    assert [each["step"] for each in found] == list(range(7))
    for ours, theirs in zip(found[1:], quiet[1:], strict=True):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6), ours["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-4), ours["step"]
    assert found[-1]["weight_version"] > 6, "versions of steps that were lost are not given again"


def test_ppo_critic_killed(
    given: tuple[Path, Path, str],
    metrics: Callable[[str], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    """The run goes on from its last checkpoint, which has both models, as a quiet run does."""
    flags = ("--algorithm.preset", "ppo", "--steps", "5", "--checkpoints.every", "2")
    begin_run(given, tmp_path / "quiet", *flags).communicate(timeout=200.0)
    out = tmp_path / "out"
    process = begin_run(given, out, *flags)
    try:
        wait_for(lambda: process.poll() is not None or _num_steps(out) > 3, 120.0)
        for pid in pids_of("critic", out):
            os.kill(pid, signal.SIGKILL)
        said, _ = process.communicate(timeout=200.0)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "critic/0 was lost" in said
    found, quiet = metrics("out"), metrics("quiet")
    assert [each["step"] for each in found] == list(range(6))
    for ours, theirs in zip(found[1:], quiet[1:], strict=True):
        for name in ("reward/mean", "critic/loss", "loss"):
            assert ours[name] == pytest.approx(theirs[name], abs=2e-4), (ours["step"], name)
