"""Test the settings of judges, and what their folders must hold, before a tokenizer is read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from helmsman.recipes.judges import Judge, LastNumber
from helmsman.recipes.roles import make_jobs
from helmsman.recipes.settings import (
    Data,
    GRPOSettings,
    Machines,
    Reward,
    Rollout,
    devices_apart,
    name_of,
)
from helmsman.recipes.sizes import choose
from tests.unit.recipes.data import settings

ASKED: dict[str, Any] = {"prompt": "Rate {{ completion }}", "parse": r"(\d+)"}
LM = {"architectures": ["Qwen3ForCausalLM"]}
CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
THREE = {**CLASSIFIER, "id2label": {"1": "fair", "0": "poor", "2": "good"}}


def write_folder(folder: Path, config: dict[str, Any] | str) -> Path:
    folder.mkdir(exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    (folder / "model.safetensors").touch()
    return folder


def judge_of(reward: Reward) -> Judge:
    run = GRPOSettings(model="m", data=Data(train="t"), rewards=(Reward(use="exact"), reward))
    return Judge(reward, run, {})


# --- numbers in answers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "verdict", "number"),
    [
        (r"Score: (\d+)", "Score: 3? No. Score: 7", 7.0),
        (r"\[\[([-+.\d]+)\]\]", "so: [[-0.5]]", -0.5),
        (r'"score":\s*([\d.]+)', '{"reason": "5 of 9", "score": 4.5}', 4.5),
        (r"(?i)rating\D*(\d+)(/10)?", "RATING = 9/10", 9.0),
        (r"Score: (\d+)", "<think>Score: 9? No.</think>\nScore: 2", 2.0),
        (r"Score: (\d+)", "Score: 9? No.</think>\nScore: 2", 2.0),
        (r"Score: (\d+)", "The <think> block is concise. Score: 7", 7.0),
        (r"Score: (\d+)", "Score: 8. It closes </think> properly.", 8.0),
    ],
)
def test_number_of_verdict(pattern: str, verdict: str, number: float) -> None:
    assert LastNumber(pattern)(verdict) == number


@pytest.mark.parametrize(
    ("pattern", "verdict", "found"),
    [
        (r"Score: (\d+)", "I cannot say.", "[]"),
        (r"Score: (\S+)", "Score: 7/10", "['7/10']"),
        (r"(\d)?x", "x", "[None]"),
        (r"Score: (\d+)", "<think>Perhaps Score: 9, but", "[]"),
        (r"Score: (\d+)", "<think>Score: 9.</think> I cannot say.", "[]"),
    ],
)
def test_verdict_without_number(pattern: str, verdict: str, found: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"finds {found}, expected a number")):
        LastNumber(pattern)(verdict)


# --- refusals -------------------------------------------------------------------------------------


def test_folder_without_a_model(tmp_path: Path) -> None:
    for name in ("absent", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=r"rewards\[1\]\.judge is .*, without config\.json"):
            judge_of(Reward(judge=str(tmp_path / name)))
    (write_folder(tmp_path / "config", CLASSIFIER) / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"without weights \(\*\.safetensors, \*\.bin\)"):
        judge_of(Reward(judge=str(tmp_path / "config")))
    adapted = write_folder(tmp_path / "adapted", CLASSIFIER)
    (adapted / "adapter_config.json").touch()
    with pytest.raises(ValueError, match=r"rewards\[1\]\.judge is .*, which holds a PEFT adapter"):
        judge_of(Reward(judge=str(adapted)))
    with pytest.raises(ValueError, match=r"\.judge has .*/config\.json: Input data was truncated"):
        judge_of(Reward(judge=str(write_folder(tmp_path / "broken", "{"))))


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (
            {"architectures": ["Qwen2ForRewardModel"]},
            {},
            ".judge is .*, which holds a Qwen2ForRewardModel, expected ...ForSequenceClassific",
        ),
        ({}, {}, "which holds a model of unknown architecture"),
        (
            {**CLASSIFIER, "auto_map": {"AutoModelForSequenceClassification": "rm.Model"}},
            {},
            r"holds a Qwen3ForSequenceClassification with code of its own \(auto_map\), expected",
        ),
        (CLASSIFIER, {"parse": r"(\d)"}, r".parse is .*, expected none for a Qwen3ForSequence"),
        (CLASSIFIER, {"engine": "vllm"}, ".engine is 'vllm', expected none for a Qwen3ForSequence"),
        (CLASSIFIER, {"devices": 2}, ".devices is 2, expected 1 or 0 for a Qwen3ForSequence"),
        (CLASSIFIER, {"label": 1}, ".label is 1 for a judge with 1, expected its number from 0, "),
        (THREE, {}, "None for a judge with 3, expected its number .* 'poor', 'fair', 'good'"),
        (THREE, {"label": "bad"}, ".label is 'bad' for a judge with 3"),
        (THREE, {"label": 3}, ".label is 3 for a judge with 3"),
        (
            {"architectures": ["BertForSequenceClassification"], "num_labels": 2},
            {"prompt": "{{ completion }}"},
            ".label is None for a judge with 2, expected its number from 0, or one of 'LABEL_0'",
        ),
        (
            {**CLASSIFIER, "type_vocab_size": 2},
            {},
            ".prompt is not given for a Qwen3ForSequenceClassification, expected the text",
        ),
        (LM, {}, ".prompt is not given for a Qwen3ForCausalLM, expected the text that it reads"),
        (LM, {**ASKED, "label": 0}, ".label is 0, expected none for a Qwen3ForCausalLM"),
        (
            LM,
            {**ASKED, "prompt": "Rate {completion}"},
            ".prompt is 'Rate {completion}', expected the answer in it: {{ completion }}",
        ),
        (LM, {**ASKED, "prompt": "{% if %}{{ completion }}"}, ".prompt is no template: Expected"),
        (
            LM,
            {**ASKED, "prompt": "absent.jinja"},
            ".prompt is no template: .*No such file .*'abs",
        ),
        (LM, {**ASKED, "parse": ""}, r".parse is '' \(there is no reward ''; .*a regular express"),
        (LM, {**ASKED, "parse": r"Score: \d+"}, ".parse is .*, expected a regular expression with"),
        (LM, {**ASKED, "parse": r"Score: (?:\d)"}, r"\(it has no group"),
        (LM, {**ASKED, "parse": "("}, r".parse is '\(' \(missing \), unterminated subpattern"),
        (LM, {**ASKED, "parse": "my_parser.py:parse"}, "there is no file"),
    ],
)
def test_judge_refused(
    tmp_path: Path, config: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    reward = Reward(judge=str(write_folder(tmp_path / "judge", config)), **given)
    with pytest.raises(ValueError, match=re.sub(r"^\.", r"rewards\\[1\\].", message)):
        judge_of(reward)


@pytest.mark.parametrize(("engine", "of_judge"), [("hf", None), ("vllm", "hf")])
def test_judge_of_several_devices_by_an_engine_of_one(
    tmp_path: Path, engine: str, of_judge: str | None
) -> None:
    folder = write_folder(tmp_path / "judge", LM)
    reward = Reward(judge=str(folder), **ASKED, devices=2, engine=of_judge)
    cluster, rollout = Machines(devices_per_node=8), Rollout(engine=engine)
    run = GRPOSettings(
        model="m", data=Data(train="t"), rewards=(reward,), cluster=cluster, rollout=rollout
    )
    with pytest.raises(ValueError, match=r"rewards\[0\].devices is 2, expected 1 or 0 for a j"):
        Judge(reward, run, {})


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"use": "exact", "judge": "j"}, r"rewards\[0\].use and rewards\[0\].judge are both given"),
        ({"name": "x"}, r"rewards\[0\].use and rewards\[0\].judge are both empty; expected one"),
        ({"use": "exact", "parse": "x"}, r"rewards\[0\].parse is given without rewards\[0\].judge"),
        ({"use": "exact", "devices": 0}, r"rewards\[0\].devices is given without"),
        ({"judge": "j", "engine": "trt"}, r"rewards\[0\].engine is 'trt'; expected vllm, hf"),
        ({"judge": "j", "instances": 0}, r"rewards\[0\].instances is 0; expected 1 or more"),
        ({"judge": "j", "promt": "x"}, r"rewards\[0\]: .*unknown field `promt`"),
    ],
)
def test_settings_refused(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(("rewards", json.dumps([reward])))


# --- roles ----------------------------------------------------------------------------------------


def test_judge_has_a_role_and_cores() -> None:
    rewards = [{"judge": "models/rm/", "instances": 2}, {"judge": "b", "name": "a/b"}, "exact"]
    found = settings(("rewards", json.dumps(rewards)))
    assert [name_of(reward) for reward in found.rewards] == ["rm", "a/b", "exact"]
    jobs = {job.role: job for job in make_jobs(found)}
    assert [*jobs][-2:] == ["judge-rm", "judge-a-b"]
    assert (jobs["judge-rm"].replicas, jobs["judge-rm"].tasks[0].gpu) == (2, 0)
    assert jobs["judge-rm"].tasks[0].cpu == jobs["rollout"].tasks[0].cpu


def test_judge_takes_devices_of_its_own() -> None:
    given = frozenset({"cluster.devices_per_node", "cluster.device_memory_gb"})

    def chosen(total: int, **reward: Any) -> GRPOSettings:
        rewards, cluster = (Reward(judge="j", **reward),), Machines(devices_per_node=total)
        run = GRPOSettings(model="m", data=Data(train="t"), rewards=rewards, cluster=cluster)
        return choose(run, given)[0]

    found = chosen(8, instances=2)
    assert (found.cluster.train_workers, found.cluster.rollout_instances) == (3, 3)
    assert [job.tasks[0].gpu for job in make_jobs(found)] == [1, 1, 1]
    found = chosen(2)
    assert (found.cluster.placement, found.cluster.train_workers) == ("colocated", 1)
    found = chosen(1, devices=0)
    assert (found.cluster.placement, devices_apart(found)) == ("colocated", {})
    assert make_jobs(found)[-1].tasks[0].gpu == 0

    one = ("cluster.devices_per_node", "1")
    with pytest.raises(
        ValueError,
        match=r"rewards\[0\].instances x devices is 1, .* beside 4 of the other roles; "
        r"expected at most 1 together \(cluster.devices_per_node x num_nodes\)",
    ):
        settings(("rewards", '[{"judge": "j"}]'), one)
    free = settings(("rewards", '[{"judge": "j", "devices": 0}]'), one)
    assert devices_apart(free) == {}
