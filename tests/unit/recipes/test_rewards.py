"""Test the rewards of the GRPO recipe: by name, and functions in the forms of other libraries."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmsman.api.errors import BackendNotInstalledError
from helmsman.recipes.rewards import GIVEN, make_caller
from helmsman.recipes.settings import Reward


def alone(use: str, completion: str, answer: Any = None, **args: Any) -> float:
    caller = make_caller(Reward(use=use, args=args))
    given = {"completion": completion, "answer": answer, "prompt": "", "source": "", "row": {}}
    (value,) = caller([given])
    return float(value)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        "def with_more(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return len(kwargs) + ('solution_str' in kwargs)\n"
        "def broken(completion):\n"
        "    raise KeyError('oops')\n"
        "def of_a_list(completion, answers):\n"
        "    return 1.0\n"
    )
    return path


def test_reward_exact() -> None:
    assert [alone("exact", text, "12") for text in ("12", " 12\n", "13", "")] == [1, 1, 0, 0]
    for use in ("exact", "number"):
        with pytest.raises(ValueError, match="the row has no answer"):
            alone(use, "", None)


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
    with pytest.raises(BackendNotInstalledError, match=r"pip install 'helmsman-rl\[math\]'"):
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
    assert with_more([dict.fromkeys(GIVEN)]) == [len(GIVEN)], "all by their first names"
    with pytest.raises(
        ValueError, match="broken' cannot be called: got an unexpected keyword argument 'sharpness'"
    ):
        make_caller(Reward(use=f"{mine}:broken", args={"sharpness": 1}))


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
    """The function is called once for all answers to a prompt, with every other key of the row."""

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
    assert none(answers) == [None, 1.0], "TRL leaves None out of the sum"
    wrong = make_caller(reward, {"m:f": lambda completions: returned})
    count = f"{len(returned)} values, " if isinstance(returned, list) else ""
    message = (
        f"the reward 'm:f' returned {count}{returned!r}, for 2 completions; expected a list of 2 "
        "numbers, one per completion"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        wrong(answers)


@pytest.mark.parametrize(
    "returned",
    [
        {"rewards": np.array([0.0, 1.0]), "scores": np.ones(2), "extra_logs": {}},
        np.array([0.0, 1.0]),
        {"rewards": [0.0, 1.0]},
    ],
)
def test_reward_written_for_openrlhf(returned: Any) -> None:
    """The function is called once for all answers to a prompt, with texts."""

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
    with pytest.raises(
        ValueError, match=r"'m:f' returned \{'scores': \[1.0\]\}, for 1 completions"
    ):
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
    assert caller([given]) == [5.0]
