"""Recipes as a script uses them: arguments, choices, the output folder, and what is printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helmsman.recipes import GRPO, PPO, GRPOSettings, make_model
from helmsman.recipes.choosing import choose, num_cores
from helmsman.recipes.config import read
from helmsman.recipes.roles import make_jobs
from helmsman.recipes.settings import Cluster, Data, Reward
from tests.recipes.runs import lines
from tests.unit.recipes.data import SUMS, write_jsonl

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("given") / "model", num_layers=1, width=32)


def digits(completions: list[str], level: list[int], **columns: Any) -> list[float]:
    """As TRL has it: it is called with all answers to a prompt."""
    assert len(columns["prompts"]) == 2
    shares = zip(completions, level, strict=True)
    return [sum(map(str.isdigit, text)) / max(1, len(text)) + 0 * each for text, each in shares]


def inline(model: Path, out: Path, **settings: Any) -> GRPO:
    """Return a run of two steps in this process."""
    small = {
        "steps": 2,
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "rollout": {"max_new_tokens": 4},
    }
    rows = [{"prompt": f"{number}+1=", "level": number} for number in range(8)]
    reward = {"use": digits, "on_cluster": True, "processes": 1}
    given: dict[str, Any] = {"data": rows, "rewards": [reward], **small, **settings}
    return GRPO(model, cluster={"scheduler": "inline"}, out=str(out), **given)


@pytest.mark.slow
def test_grpo_of_rows_and_functions(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = inline(model, tmp_path / "out").train()
    assert summary.steps == 2
    assert [row["step"] for row in lines(tmp_path / "out" / "metrics.jsonl")] == [0, 1, 2]
    said = capsys.readouterr().out
    assert "chosen: rollout.engine: hf (" in said
    assert "8 prompts to train on, 0 held out" in said


@pytest.mark.slow
def test_grpo_earlier_run_in_folder(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    inline(model, out).train()
    message = (
        rf"the output folder {out} has an earlier run \(2 steps\), expected an empty folder. "
        "Give --resume to continue it, --overwrite to replace it, or another --out"
    )
    with pytest.raises(FileExistsError, match=message):
        inline(model, out).train()
    assert inline(model, out, resume=True, steps=3).train().steps == 3
    assert [row["step"] for row in lines(out / "metrics.jsonl")] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="data is .* in the run to resume and .* now"):
        inline(model, out, resume=True, data=["1+1="]).train()
    inline(model, out, overwrite=True).train()
    assert [row["step"] for row in lines(out / "metrics.jsonl")] == [0, 1, 2]


def test_grpo_plan_shows_arithmetic(model: Path, tmp_path: Path) -> None:
    said = inline(model, tmp_path / "out").plan()
    assert "rollout.max_in_flight: 4 (the least of 4 requests of a step, " in said
    assert "of cache for 1028 tokens" in said
    assert "train.engine.max_tokens_per_micro_batch: " in said
    assert said.rstrip().splitlines()[-1].startswith("rollout  0")
    assert not (tmp_path / "out").exists()


def minimal(**cluster: Any) -> GRPOSettings:
    rewards = (Reward(use="exact"),)
    return GRPOSettings(
        model="m", data=Data(train="t"), rewards=rewards, cluster=Cluster(**cluster)
    )


def test_choose_threads_of_roles_that_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found, choices = choose(minimal(), frozenset({"cluster.devices_per_node"}))
    cores = str(num_cores())
    assert [job.tasks[0].env_vars["OMP_NUM_THREADS"] for job in make_jobs(found)] == [cores, cores]
    assert sum(job.tasks[0].cpu for job in make_jobs(found)) == num_cores(), (
        "they fit beside each other"
    )
    assert f"the roles alternate on {cores} cores" in {choice.reason for choice in choices}

    ahead = msgspec.structs.replace(
        minimal(), rollout=msgspec.structs.replace(minimal().rollout, staleness=1.0)
    )
    found, _ = choose(ahead, frozenset({"cluster.devices_per_node"}))
    assert found.cluster.train_threads == 0, "roles that work at once share the cores"
    found, _ = choose(minimal(), frozenset({"cluster.devices_per_node", "cluster.train_cpus"}))
    assert (found.cluster.train_threads, found.cluster.rollout_threads) == (0, num_cores())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found, _ = choose(minimal(), frozenset({"cluster.devices_per_node"}))
    assert found.cluster.train_threads == 1


def test_choose_groups_of_devices() -> None:
    given = frozenset({"cluster.devices_per_node", "cluster.device_memory_gb"})
    found, _ = choose(minimal(devices_per_node=8), given)
    assert (found.cluster.train_workers, found.cluster.rollout_instances) == (4, 4)
    found, _ = choose(minimal(devices_per_node=1), given)
    assert (found.cluster.placement, found.cluster.train_workers) == ("colocated", 1)
    found, _ = choose(
        minimal(devices_per_node=8, num_nodes=4, rollout_devices=2),
        given | {"cluster.rollout_devices"},
    )
    assert found.cluster.scheduler == "ray"
    assert (found.cluster.train_workers, found.cluster.rollout_instances) == (16, 8)


def test_sizes_from_device_memory(tmp_path: Path) -> None:
    shape = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128000,
        "intermediate_size": 14336,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    given = {"model": str(tmp_path), "data": {"train": "t"}, "rewards": [{"use": "exact"}]}
    cluster = {"devices_per_node": 8, "device_memory_gb": 80.0}
    found, choices = read(GRPOSettings, given={**given, "cluster": cluster})
    sizes = {choice.key: choice for choice in choices}
    assert found.train.engine["max_tokens_per_micro_batch"] == 4096
    assert (
        "80 GB of a device - 32.1 GB of state"
        in sizes["train.engine.max_tokens_per_micro_batch"].reason
    )
    assert found.rollout.max_in_flight == 128, "512 answers for 4 instances"
    assert sizes["rollout.max_in_flight"].value == 128
    small, _ = read(GRPOSettings, given={**given, "cluster": {**cluster, "device_memory_gb": 24.0}})
    assert small.rollout.max_in_flight < 128


def test_grpo_rewards_of_every_kind(model: Path) -> None:
    recipe = GRPO(
        model,
        ["1+1="],
        ["exact", digits, {"use": "number", "weight": 2.0}, Reward(use="json:dumps", name="j")],
    )
    uses = [reward.use for reward in recipe.settings.rewards]
    assert uses == ["exact", f"{__name__}:digits", "number", "json:dumps"]
    assert list(recipe.functions) == [f"{__name__}:digits"]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_command_grpo(model: Path, tmp_path: Path) -> None:
    """As a user types it, with a configuration of the package by its name."""
    data = write_jsonl(tmp_path / "sums.jsonl", SUMS)
    flags = [
        "--config",
        "cpu_smoke",
        "--model",
        str(model),
        "--data",
        str(data),
        "--cluster.scheduler",
        "local",
    ]
    small = [
        "--steps",
        "1",
        "--rollout.max_new_tokens",
        "4",
        "--evaluation.every",
        "0",
        "--out",
        "out",
    ]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "helmsman", "grpo", *flags, *small, *more]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
            env=environment,
        )

    ran = run()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "out" / "summary.json").exists()
    refused = run()
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "has an earlier run (1 steps), expected an empty folder. Give --resume" in refused.stderr


def test_command_help_lists_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    from helmsman.__main__ import main

    with pytest.raises(SystemExit):
        main(["--help"])
    assert "grpo" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["grpo", "--help"])
    assert "one_machine_8gpu_colocated" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_ppo_critic_learns_and_resumes(model: Path, tmp_path: Path) -> None:
    def run(steps: int, **settings: Any) -> list[dict[str, Any]]:
        PPO(
            model,
            [f"{number}+1=" for number in range(8)],
            [digits_of],
            steps=steps,
            prompts_per_step=8,
            rollout={"max_new_tokens": 6},
            critic={"lr": 1e-2},
            cluster={"scheduler": "local"},
            checkpoints={"every": 2},
            out=str(tmp_path / "out"),
            **settings,
        ).train()
        return lines(tmp_path / "out" / "metrics.jsonl")

    found = run(4)
    assert found[-1]["critic/loss"] < found[1]["critic/loss"]
    assert "advantages" not in found[-1]
    assert (tmp_path / "out" / "checkpoints" / "latest" / "critic").exists()
    found = run(5, resume=True)
    assert [row["step"] for row in found] == list(range(6))
    assert found[-1]["critic/loss"] < found[1]["critic/loss"], "it goes on from what it has learnt"


def digits_of(completion: str) -> float:
    return sum(map(str.isdigit, completion)) / max(1, len(completion))
