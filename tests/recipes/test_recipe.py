"""Test recipes as a script uses them: arguments, the output folder, and the printed text."""

from __future__ import annotations

import functools
import json
import shutil
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from helmsman.recipes import GRPO, GRPOSettings
from helmsman.recipes.config import read
from helmsman.recipes.settings import Reward, name_of
from tests.recipes.runs import lines


def digits(completions: list[str], level: list[int], **columns: Any) -> list[float]:
    """Score all answers to a prompt, as TRL does."""
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


def test_grpo_rows_and_functions(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run in a folder with an earlier one resumes it, replaces it, or is refused."""
    out = tmp_path / "out"

    def steps() -> list[int]:
        return [row["step"] for row in lines(out / "metrics.jsonl")]

    assert inline(model, out).train().steps == 2
    assert steps() == [0, 1, 2]
    printed = capsys.readouterr().out
    assert "chosen: rollout.engine: hf (" in printed
    assert "8 prompts to train on, 0 held out" in printed
    message = (
        rf"the output folder {out} has an earlier run \(2 steps\), expected an empty folder. "
        "Give --resume to continue it, --overwrite to replace it, or another --out"
    )
    with pytest.raises(FileExistsError, match=message):
        inline(model, out).train()
    assert inline(model, out, resume=True, steps=3).train().steps == 3
    assert steps() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="data is .* in the run to resume and .* now"):
        inline(model, out, resume=True, data=["1+1="]).train()
    adapters = {"engine": {"lora": {"alpha": 8.0}}}
    with pytest.raises(ValueError, match=r"train.engine.lora is None in the run .*'alpha': 8.0"):
        inline(model, out, resume=True, train=adapters).train()
    (out / "adapter").mkdir()
    inline(model, tmp_path / "lora", train={"engine": {"lora": {"rank": 4}}}).train()
    same = {"engine": {"lora": {"rank": 4, "alpha": 32.0, "dropout": 0.1}}}
    inline(model, tmp_path / "lora", resume=True, steps=3, train=same).train()
    inline(model, out, overwrite=True).train()
    assert steps() == [0, 1, 2]
    assert not (out / "adapter").exists(), "it would be of another model"
    shutil.copytree(model, out / "model", dirs_exist_ok=True)
    teacher = {"teacher": str(out / "model")}
    message = "algorithm.teacher .*/model is inside the output folder .*, which a new run replaces"
    with pytest.raises(ValueError, match=message):
        inline(model, out, overwrite=True, algorithm=teacher).train()
    assert (out / "model").exists()


def test_grpo_plan_shows_arithmetic(model: Path, tmp_path: Path) -> None:
    printed = inline(model, tmp_path / "out").plan()
    assert "rollout.max_in_flight: 4 (the least of 4 requests of a step, " in printed
    assert "of cache for 1028 tokens" in printed
    assert "train.engine.max_tokens_per_micro_batch: " in printed
    assert printed.rstrip().splitlines()[-1].startswith("rollout  0")
    assert not (tmp_path / "out").exists()


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
        [
            "exact",
            digits,
            {"use": digits, "name": "d", "weight": 2.0},
            Reward(use="json:dumps", name="j"),
        ],
    )
    uses = [reward.use for reward in recipe.settings.rewards]
    assert uses == ["exact", f"{__name__}:digits", f"{__name__}:digits", "json:dumps"]
    assert [name_of(each) for each in recipe.settings.rewards] == ["exact", "digits", "d", "j"]
    assert list(recipe.functions) == [f"{__name__}:digits"]


def test_grpo_rewards_of_one_name(model: Path) -> None:
    """Partials, or objects of one class, are rewards of their own."""
    rewards: list[Any] = [
        {"use": functools.partial(digits, ["one"]), "name": "one"},
        {"use": functools.partial(digits, ["two"]), "name": "two"},
        functools.partial(digits, ["three"]),
    ]
    recipe = GRPO(model, ["1+1="], rewards)
    found: list[Any] = [recipe.functions[reward.use] for reward in recipe.settings.rewards]
    assert [each.args for each in found] == [(["one"],), (["two"],), (["three"],)]
    assert [name_of(each) for each in recipe.settings.rewards] == ["one", "two", "partial_3"]


def test_command_help_lists_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    from helmsman.__main__ import main

    with pytest.raises(SystemExit):
        main(["--help"])
    assert "grpo" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["grpo", "--help"])
    assert "one_machine_8gpu_colocated" in " ".join(capsys.readouterr().out.split())


def test_agent_addresses(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    public = f"http://localhost:{port}/rl"
    urls = set()

    def agent(task: dict[str, Any], base_url: str, api_key: str) -> float:
        urls.add(base_url.partition("/sessions/")[0])
        body = {"model": "m", "messages": [{"role": "user", "content": task["prompt"]}]}
        request = urllib.request.Request(
            f"{base_url.replace('/rl', '')}/chat/completions",  # as a proxy removes the path
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return float(len(answer.read()))

    listening = {"use": agent, "host": "0.0.0.0", "port": port, "public_url": public}
    run = inline(model, tmp_path / "out", steps=1, rewards=None, agent=listening)
    assert run.train().steps == 1
    assert urls == {public}
