"""Test judges: the texts that they read, their rewards, and that a text is judged once."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from helmsman import GenerationResult, InlineScheduler
from helmsman.recipes.judges import Judge
from helmsman.recipes.prompts import Row
from helmsman.recipes.roles import make_jobs
from helmsman.recipes.scorer import Completion, Scored, Scorer
from helmsman.recipes.settings import Data, GRPOSettings, Machines, Reward, Rollout
from tests.recipes.judge_models import make_classifier, make_judge
from tests.recipes.runs import TWO_STEPS, Runs
from tests.unit.recipes.data import completed

pytestmark = pytest.mark.timeout(200)

ENTRY = {"prompt": "1+1=", "answer": "2", "rubric": "be brief", "nothing": None}
ROW = Row([1], "<user>1+1=\n<assistant>", "2", "sums", ENTRY, "1+1=", "rows.jsonl:3")
ENDS: dict[str, Any] = {"prompt": "{{ completion }}", "parse": r"(\d)", "max_new_tokens": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the judges."""
    made = tmp_path_factory.mktemp("judges")
    make_classifier(made / "rm")
    make_classifier(made / "pairs", template=None)
    make_classifier(made / "labels", labels=("poor", "fair", "good"))
    make_judge(made / "lm")
    return made


def judge_of(reward: Reward, **functions: Any) -> Judge:
    settings = GRPOSettings(
        model="m",
        data=Data(train="t"),
        rewards=(reward,),
        rollout=Rollout(max_new_tokens=16, max_in_flight=8),
        cluster=Machines(rollout_cpus=0.5),
    )
    return Judge(reward, settings, functions)


def given(text: str, row: Row = ROW) -> dict[str, Any]:
    result = GenerationResult(
        request_id="r", token_ids=[7], logprobs=[0.0], versions=[0], stop_reason="stop"
    )
    return Completion(text, result).given(row)


def score(judge: Judge, *texts: str, rounds: int = 1) -> Any:
    """Return the rewards of answers to the row, and the tokens that the judge has generated."""
    judge.require_row(ROW)
    reward, settings = judge.reward, judge._settings

    async def run(scorer: Scorer) -> list[Scored]:
        return await scorer.score(ROW, [completed(text) for text in texts])

    with InlineScheduler() as inline:
        judge.serve(inline, make_jobs(settings)[-1])
        with Scorer((reward,), inline, {}, [judge]) as scorer:
            for _ in range(rounds):  # each on an event loop of its own
                found = asyncio.run(run(scorer))
        if judge.is_classifier:
            return found
        stats = inline.call_engine(judge.rollout.workers[0].id, "stats")
        return found, stats["num_generated_tokens"]


# --- texts ----------------------------------------------------------------------------------------


def test_reward_model_reads_the_chat(folder: Path) -> None:
    """Its own template is applied once, without a second first token (Skywork-Reward's card)."""
    judge = judge_of(Reward(judge=str(folder / "rm")))
    tokenizer = judge.tokenizer.tokenizer
    chat = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}]
    row = Row([1], "", "2", "", {}, chat)
    whole = [*chat, {"role": "assistant", "content": "it is 2"}]
    expected = tokenizer.apply_chat_template(whole, return_dict=False)
    assert judge.encode(given("it is 2", row)) == expected
    begun = Row([1], "", "2", "", {}, [*chat, {"role": "assistant", "content": "it "}])
    assert judge.encode(given("is 2", begun)) == expected
    text = judge.tokenizer.decode(judge.encode(given("2")))
    assert text == "<user>1+1=\n<assistant>2\n"


def test_judge_without_chat_template_reads_a_pair(folder: Path) -> None:
    judge = judge_of(Reward(judge=str(folder / "pairs")))
    row = Row(
        [1],
        "",
        None,
        "",
        {},
        [{"role": "user", "content": "1+"}, {"content": "1=", "role": "user"}],
    )
    assert judge.tokenizer.decode(judge.encode(given("2"))) == "1+1=2"
    assert judge.tokenizer.decode(judge.encode(given("2", row))) == "1+\n\n1=2"


def test_judge_reads_a_template(folder: Path, tmp_path: Path) -> None:
    """``prompt`` is the prompt without the policy's template; the answer is not rendered again."""
    text = "{{ rubric }}: {{ prompt }}{{ completion }}/{{ answer }}{{ nothing | default('') }}"
    (tmp_path / "judge.jinja").write_text(text)
    for name, prompt in (("rm", text), ("lm", str(tmp_path / "judge.jinja"))):
        parse = r"(\d)" if name == "lm" else ""
        judge = judge_of(Reward(judge=str(folder / name), prompt=prompt, parse=parse))
        judge.require_row(ROW)
        found = judge.tokenizer.decode(judge.encode(given("{{ 1 }}")))
        assert found == "be brief: 1+1={{ 1 }}/2"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            Row([1], "x", None, "", {"prompt": "x", "rubrics": 1}, "x", "rows.jsonl:7"),
            r"row \(rows.jsonl:7\): .*'rubric' is undefined\), expected only prompt, .*Mend",
        ),
        (Row([1], "x", None, "", {"rubric": None}, "x", "a"), "'rubric' is undefined"),
    ],
)
def test_row_without_a_field(folder: Path, row: Row, message: str) -> None:
    reward = Reward(judge=str(folder / "lm"), prompt="{{ rubric }}{{ completion }}", parse=r"(\d)")
    with pytest.raises(ValueError, match=message):
        judge_of(reward).require_row(row)


def test_prompt_of_tokens(folder: Path) -> None:
    row = Row([1, 2], "text", None, "", {}, [1, 2], "rows.jsonl:7")
    with pytest.raises(ValueError, match=r"\(rows.jsonl:7\): rewards\[0\].judge reads texts and"):
        judge_of(Reward(judge=str(folder / "rm"))).require_row(row)
    judge = judge_of(Reward(judge=str(folder / "rm"), prompt="{{ prompt }} {{ completion }}"))
    judge.require_row(row)
    assert judge.tokenizer.decode(judge.encode(given("2", row))) == "text 2"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages if m.role != 'system' %}{{ m.role + m.content }}{% endfor %}",
            r"\(rows.jsonl:7\): 'prompt'\[0\].content is left out by the chat template, .*Mend the",
        ),
        (
            (
                "{% for m in messages %}{{ raise_exception('no system') if m.role == 'system' }}"
                "{{ m.role + m.content }}{% endfor %}"
            ),
            r"'prompt' is refused by the chat template \(TemplateError: no system\)",
        ),
    ],
    ids=["left-out", "raises"],
)
def test_system_prompt_that_the_judge_does_not_take(
    tmp_path: Path, template: str, message: str
) -> None:
    """The second is Gemma 2's. A row that the judge would read without it is refused at start."""
    judge = judge_of(Reward(judge=str(make_classifier(tmp_path, template=template))))
    judge.require_row(ROW)
    chat = [{"role": "system", "content": "In French"}, {"role": "user", "content": "1+1="}]
    with pytest.raises(ValueError, match=message):
        judge.require_row(Row([1], "", "2", "", {}, chat, "rows.jsonl:7"))


# --- rewards --------------------------------------------------------------------------------------


def test_reward_model(folder: Path) -> None:
    texts = ("abcd", "12ab", "1234")
    judge = judge_of(Reward(judge=str(folder / "rm"), weight=2.0))
    found = score(judge, *texts)
    values = [each.values["rm"] for each in found]
    assert values == sorted(values)
    assert [each.total for each in found] == [2 * value for value in values]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "rm").eval()
    for text, value in zip(texts, values, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([judge.encode(given(text))])).logits[0, 0]
        assert value == pytest.approx(float(expected), abs=1e-5)


def test_label_of_several(folder: Path) -> None:
    """Its probability, as in transformers' pipelines."""
    good = score(judge_of(Reward(judge=str(folder / "labels"), label="good")), "12", "ab")
    poor = score(judge_of(Reward(judge=str(folder / "labels"), label=0)), "12", "ab")
    assert good[0].total > good[1].total
    for one, other in zip(good, poor, strict=True):
        assert one.total + 2 * other.total == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("kind", "logits", "value"),
    [
        (None, [0.0, math.log(3)], 0.75),
        ("single_label_classification", [0.0, 9e9], 1.0),
        ("multi_label_classification", [5.0, 0.0], 0.5),
        ("multi_label_classification", [5.0, -9e9], 0.0),
        ("regression", [5.0, -2.5], -2.5),
    ],
)
def test_score_of_labels(
    tmp_path: Path, kind: str | None, logits: list[float], value: float
) -> None:
    make_classifier(tmp_path / "judge", labels=("a", "b"))
    path = tmp_path / "judge" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "problem_type": kind}))
    judge = judge_of(Reward(judge=str(tmp_path / "judge"), label="b"))
    assert judge.score(logits) == pytest.approx(value)
    with pytest.raises(ValueError, match="'judge' returned nan, expected a finite number"):
        judge.score([1.0, math.nan])


def test_same_text_is_judged_once(folder: Path) -> None:
    judge = judge_of(Reward(judge=str(folder / "lm"), processes=1, **ENDS))
    found, num_asked = score(judge, "a1", "a2", "a1", "a1", "b", "b", rounds=2)
    assert num_asked == 3
    assert [each.values for each in found] == [{"lm": 1.0}] * 4 + [{}] * 2
    assert [each.is_left_out for each in found] == [False] * 4 + [True] * 2
    assert (
        found[-1]
        .failures[0]
        .cause.startswith("the judge 'lm' answered 'x', cut off at max_new_tokens: ")
    )
    assert r"'(\\d)' finds [], expected a number" in found[-1].failures[0].cause


def test_verdict_is_parsed_by_a_function(folder: Path, tmp_path: Path) -> None:
    """It is written like a reward, and its completion is the judge's answer."""
    (tmp_path / "mine.py").write_text(
        "def words(completion, answer):\n"
        "    return {'1': {'score': 10.0 + float(answer)}}.get(completion)\n"
    )
    given: dict[str, Any] = {**ENDS, "parse": f"{tmp_path}/mine.py:words", "processes": 1}
    judge = judge_of(Reward(judge=str(folder / "lm"), **given))
    (good, unknown), _ = score(judge, "1", "b")
    assert good.total == 12.0
    assert "returned None; expected a number from at least one" in unknown.failures[0].cause


def test_verdict_whose_thinking_the_template_begins(folder: Path, tmp_path: Path) -> None:
    """Cut off in its thoughts, it has no mark of them: huggingface/trl issue 6966."""
    shutil.copytree(folder / "lm", tmp_path / "lm")
    template = "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}"
    (tmp_path / "lm" / "chat_template.jinja").write_text(template)
    given: dict[str, Any] = {**ENDS, "parse": "(x)", "processes": 1, "judge": str(tmp_path / "lm")}
    (found,), _ = score(judge_of(Reward(**given)), "b")
    assert "answered '<think>x', cut off at max_new_tokens: " in found.failures[0].cause


def test_failures_of_the_judge(folder: Path) -> None:
    """An answer that is too long for it, and one that the template cannot take."""
    long = judge_of(Reward(judge=str(folder / "rm"), engine_args={"max_model_len": 40}))
    good, cut = score(long, "1", "1" * 60)
    assert good.failures == ()
    assert "tokens, which leaves no room for a continuation within max_model_len=40" in (
        cut.failures[0].cause
    )
    prompt = "{{ completion.split('x')[1] if 'y' in completion else completion }}"
    strict = judge_of(Reward(judge=str(folder / "rm"), prompt=prompt))
    good, refused = score(strict, "1", "y")
    assert good.failures == ()
    assert refused.failures[0].cause.startswith("rewards[0].prompt cannot be filled in (list obj")


def test_time_limit_of_the_judge(folder: Path) -> None:
    slow: dict[str, Any] = {**ENDS, "max_new_tokens": 400, "timeout_s": 0.01, "on_failure": "value"}
    judge = judge_of(Reward(judge=str(folder / "lm"), processes=1, **slow))
    (found,), _ = score(judge, "1")
    assert found.total == 0.0
    assert "0.01 s" in found.failures[0].cause


# --- runs -----------------------------------------------------------------------------------------


def test_run_with_judges(runs: Runs, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards: list[dict[str, Any]] = [
        {"judge": str(folder / "rm")},
        {"judge": str(folder / "lm"), **ENDS, "processes": 1},
    ]
    rewards[1] |= {"on_failure": "value", "weight": 0.5}
    flags = ("--rewards", json.dumps(rewards))
    assert runs.here("plan", *flags, "--plan", "--cluster.scheduler", "local") == 0
    roles = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert roles[-2:] == ["judge-rm", "judge-lm"]
    assert runs.here("out", *flags, *TWO_STEPS) == 0
    for row in runs.metrics("out")[1:]:
        total = row["reward/rm/mean"] + 0.5 * row["reward/lm/mean"]
        assert row["reward/mean"] == pytest.approx(total, abs=1e-5)


def test_unfit_judges_start_nothing(
    runs: Runs, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for reward, message in (
        ({"judge": str(runs.folder)}, "rewards[0].judge is "),
        ({"judge": str(folder / "labels")}, "rewards[0].label is None for a judge with 3"),
        (
            {"judge": str(folder / "lm"), **ENDS, "prompt": "{{ rubric }}{{ completion }}"},
            "sums.jsonl, line 1): rewards[0].prompt cannot be filled in ('rubric' is undefined)",
        ),
    ):
        assert runs.here("out", "--rewards", json.dumps([reward])) == 2
        assert message in capsys.readouterr().err
    assert not (runs.folder / "out" / "logs").exists()
