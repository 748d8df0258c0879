"""Rewards of the GRPO recipe: by name, by the user's function, in processes with a limit of
time."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helmsman import InlineScheduler
from helmsman.api.errors import BackendNotInstalledError, EngineCallError
from helmsman.recipes.prompts import Row
from helmsman.recipes.rewards import GIVEN, make_caller
from helmsman.recipes.scorer import Scored, Scorer
from helmsman.recipes.settings import Reward
from tests.unit.recipes.data import completed

ROW = Row([1], "1+1=", "2", "sums", {"prompt": "1+1=", "answer": "2", "level": 3})


def score_all(scorer: Scorer, *texts: str) -> list[Scored]:
    """The rewards of answers of one token each to one prompt."""

    async def score() -> list[Scored]:
        return await scorer.score(ROW, [completed(text) for text in texts])

    return asyncio.run(score())


def score(*rewards: Reward, completion: str = "2") -> Scored:
    with InlineScheduler() as scheduler, Scorer(rewards, scheduler) as scorer:
        (scored,) = score_all(scorer, completion)
        return scored


def alone(use: str, completion: str, answer: Any = None, **args: Any) -> float:
    caller = make_caller(Reward(use=use, args=args))
    given = {"completion": completion, "answer": answer, "prompt": "", "source": "", "row": {}}
    (value,) = caller([given])
    return float(value)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        "import asyncio, time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': float(solution_str == ground_truth) + extra_info['level'], 'note': "
        "data_source}\n"
        "def with_more(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return float(solution_str == ground_truth) + len(kwargs) + ('solution_str' in "
        "kwargs)\n"
        "async def by_a_judge(completion, scale=1.0):\n"
        "    await asyncio.sleep(0)\n"
        "    return scale * len(completion)\n"
        "def never_ends(completion):\n"
        "    time.sleep(1000)\n"
        "def broken(completion):\n"
        "    raise KeyError('oops')\n"
        "def everything(**given):\n"
        "    return float(len(given))\n"
        "def no_number(completion):\n"
        "    return {'text': 'good', 'nothing': float('nan')}.get(completion)\n"
        "def of_a_list(completion, answers):\n"
        "    return 1.0\n"
    )
    return path


def test_reward_exact() -> None:
    assert [alone("exact", text, "12") for text in ("12", " 12\n", "13", "")] == [1, 1, 0, 0]
    assert alone("exact", "", None) == 0


def test_reward_number() -> None:
    texts = ("it is 1,234.50", "1234.5", "first 7, then 1234.5", "1234.6", "none")
    assert [alone("number", text, "1234.5") for text in texts] == [1, 1, 1, 0, 0]
    assert alone("number", "0.333", 1 / 3, tolerance=0.01) == 1
    assert alone("number", "-5", -5) == 1
    assert [
        alone("number", text, "5") for text in ("1e9999999", "-1e99999999999999999999", "5e0")
    ] == [0, 0, 1]


def test_reward_format() -> None:
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    assert alone("format", "<think>a\nb</think>\n<answer>2</answer>\n", pattern=pattern) == 1
    assert alone("format", "sure! <think></think><answer></answer>", pattern=pattern) == 0
    with pytest.raises(ValueError, match="the reward 'format' does not take"):
        make_caller(Reward(use="format"))
    with pytest.raises(ValueError, match="the reward 'format' does not take"):
        make_caller(Reward(use="format", args={"pattern": "("}))
    with pytest.raises(
        ValueError, match="the reward 'number' does not take {'tolerance': 'small'}"
    ):
        make_caller(Reward(use="number", args={"tolerance": "small"}))


def test_reward_math_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(BackendNotInstalledError, match=r"pip install 'helmsman\[math\]'"):
        make_caller(Reward(use="math"))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("nothing", "there is no reward 'nothing'; expected exact, number"),
        ("no.such.module:f", "No module named 'no'"),
        ("nowhere.py:f", "there is no file"),
        ("json:nothing", "json has no function 'nothing'"),
    ],
)
def test_make_caller_unknown_reward(use: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_caller(Reward(use=use))


def test_make_caller_signature_mismatch(mine: Path) -> None:
    with pytest.raises(
        ValueError,
        match="of_a_list' cannot be called: missing a required argument: 'answers'. A reward may",
    ):
        make_caller(Reward(use=f"{mine}:of_a_list"))
    assert make_caller(Reward(use=f"{mine}:of_a_list", args={"answers": []}))
    with_more = make_caller(Reward(use=f"{mine}:with_more"))
    assert with_more([dict.fromkeys(GIVEN)]) == [1.0 + len(GIVEN)], (
        "and one that takes any is given all by their first names"
    )
    with pytest.raises(
        ValueError, match="broken' cannot be called: got an unexpected keyword argument 'sharpness'"
    ):
        make_caller(Reward(use=f"{mine}:broken", args={"sharpness": 1}))


@pytest.mark.slow
def test_scorer_weighted_sum(mine: Path) -> None:
    found = score(
        Reward(use="exact", processes=1),
        Reward(use=f"{mine}:compute_score", weight=0.5, processes=1),
        Reward(
            use=f"{mine}:by_a_judge", name="judge", weight=2.0, args={"scale": 0.25}, processes=1
        ),
    )
    assert found.values == {"exact": 1.0, "compute_score": 4.0, "judge": 0.25}
    assert found.total == 1.0 + 2.0 + 0.5


@pytest.mark.slow
def test_scorer_timeout(mine: Path) -> None:
    found = score(
        Reward(use=f"{mine}:never_ends", timeout_s=0.2, processes=1),
        Reward(use="exact", processes=1),
    )
    assert (found.values, found.total, found.failed) == ({"never_ends": 0.0, "exact": 1.0}, 1.0, 1)


@pytest.mark.slow
def test_scorer_function_raises(mine: Path) -> None:
    with pytest.raises(EngineCallError, match="oops"):
        score(Reward(use=f"{mine}:broken", processes=1))
    for completion, returned in (("text", "'good'"), ("nothing", "nan"), ("2", "None")):
        with pytest.raises(
            ValueError,
            match=f"the reward 'no_number' returned {returned}; expected a finite number",
        ):
            score(Reward(use=f"{mine}:no_number", processes=1), completion=completion)


@pytest.mark.slow
def test_scorer_on_cluster(mine: Path) -> None:
    assert score(Reward(use=f"{mine}:everything", on_cluster=True, processes=2)).total == len(GIVEN)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("1+1=", ["2", "3"]),
        (
            [{"role": "user", "content": "1+1="}],
            [[{"role": "assistant", "content": text}] for text in ("2", "3")],
        ),
    ],
)
def test_reward_written_for_trl(prompt: Any, expected: list[Any]) -> None:
    """It is called once for all answers to a prompt, with every other key of the row."""

    def ranks(
        prompts: list[Any], completions: list[Any], level: list[int], **columns: Any
    ) -> list[float]:
        assert prompts == [prompt, prompt]
        assert completions == expected
        assert level == [3, 3]
        assert columns == {"completion_ids": [[7], [8]], "answer": ["2", "2"]}
        return [float(index) for index in range(len(completions))]

    row = {"prompt": prompt, "answer": "2", "level": 3}
    answers = [
        dict.fromkeys(GIVEN)
        | {"completion": text, "token_ids": [token], "chat": prompt, "row": row}
        for text, token in (("2", 7), ("3", 8))
    ]
    caller = make_caller(Reward(use="m:ranks"), {"m:ranks": ranks})
    assert caller(answers) == [0.0, 1.0]


@pytest.mark.parametrize("returned", [1.0, [1.0], [1.0, 2.0, 3.0], "12", {"score": 1.0, "b": 2.0}])
def test_reward_written_for_trl_values(returned: Any) -> None:
    answers = [dict.fromkeys(GIVEN) | {"row": {}, "token_ids": []}] * 2
    reward = Reward(use="m:f")
    none = make_caller(reward, {"m:f": lambda completions: [None, 1.0]})
    assert none(answers) == [0.0, 1.0], "TRL leaves None out of the sum"
    wrong = make_caller(reward, {"m:f": lambda completions: returned})
    message = (
        f"the reward 'm:f' returned {returned!r} for 2 completions; expected a list of 2 numbers, "
        "one per completion"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        wrong(answers)


@pytest.mark.parametrize(
    "returned",
    [
        {"rewards": torch.tensor([0.0, 1.0]), "scores": torch.ones(2), "extra_logs": {}},
        torch.tensor([0.0, 1.0]),
        {"rewards": [0.0, 1.0]},
    ],
)
def test_reward_written_for_openrlhf(returned: Any) -> None:
    """It is called once for all answers to a prompt, with texts."""

    def reward_func(
        queries: list[str], prompts: list[str], labels: list[str], **kwargs: Any
    ) -> Any:
        assert queries == ["Q: 1+1= 2", "Q: 1+1= 3"]
        assert prompts == ["Q: 1+1= "] * 2
        assert (labels, kwargs) == (["2", "2"], {})
        return returned

    answers = [
        dict.fromkeys(GIVEN) | {"prompt": "Q: 1+1= ", "completion": text, "answer": "2", "row": {}}
        for text in "23"
    ]
    caller = make_caller(Reward(use="m:reward_func"), {"m:reward_func": reward_func})
    assert caller(answers) == [0.0, 1.0]


def test_reward_written_for_openrlhf_values() -> None:
    def scores_alone(queries: list[str], prompts: list[str], labels: list[str]) -> Any:
        return {"scores": [1.0]}

    caller = make_caller(Reward(use="m:f"), {"m:f": scores_alone})
    with pytest.raises(ValueError, match=r"'m:f' returned \{'scores': \[1.0\]\} for 1 completions"):
        caller([dict.fromkeys(GIVEN) | {"prompt": "", "completion": "", "row": {}}])


def test_reward_written_for_trl_logs() -> None:
    def logs(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("text", completions)
        log_metric("mean", 1.0)
        return [1.0] * len(completions)

    given = dict.fromkeys(GIVEN) | {"row": {}}
    assert make_caller(Reward(use="m:logs"), {"m:logs": logs})([given]) == [1.0]


def test_reward_written_for_verl() -> None:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
    ) -> dict[str, Any]:
        return {
            "score": float(solution_str == ground_truth) + extra_info["index"],
            "of": data_source,
        }

    caller = make_caller(Reward(use="m:compute_score"), {"m:compute_score": compute_score})
    row = {"extra_info": {"index": 4}, "reward_model": {"ground_truth": "2"}}
    given = dict.fromkeys(GIVEN) | {"completion": "2", "answer": "2", "source": "s", "row": row}
    assert caller([given]) == [{"score": 5.0, "of": "s"}]


@pytest.mark.slow
def test_scorer_function_of_a_script() -> None:
    """A function that no process could import travels as it is."""
    secret = 40

    def own(completion: str) -> float:
        return secret + float(completion)

    with (
        InlineScheduler() as scheduler,
        Scorer([Reward(use="s:own", processes=1)], scheduler, {"s:own": own}) as scorer,
    ):
        (scored,) = score_all(scorer, "2")
    assert scored.values == {"own": 42.0}


@pytest.mark.slow
def test_scorer_batch_beside_single(tmp_path: Path) -> None:
    """A reward that takes batches compares all answers to a prompt, and fails for all at once."""
    path = tmp_path / "batches.py"
    path.write_text(
        "import time\n"
        "async def shortest(completions):\n"
        "    return [float(len(text) == min(map(len, completions))) for text in completions]\n"
        "def stuck(completions):\n"
        "    time.sleep(1000)\n"
    )
    rewards = (
        Reward(use=f"{path}:shortest", processes=1),
        Reward(use="exact", weight=10.0, processes=1),
    )
    with InlineScheduler() as scheduler, Scorer(rewards, scheduler) as scorer:
        scored = score_all(scorer, "22", "2", "234")
    assert [each.values for each in scored] == [
        {"shortest": 0.0, "exact": 0.0},
        {"shortest": 1.0, "exact": 1.0},
        {"shortest": 0.0, "exact": 0.0},
    ]
    assert [each.total for each in scored] == [0.0, 11.0, 0.0]
    stuck = Reward(use=f"{path}:stuck", processes=1, timeout_s=0.5)
    with InlineScheduler() as scheduler, Scorer([stuck], scheduler) as scorer:
        assert score_all(scorer, "2", "3") == [Scored({"stuck": 0.0}, 0.0, failed=1)] * 2
