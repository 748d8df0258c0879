"""Sources, splits, columns and answers of rows are used as meant, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helmsman.recipes import GRPO, SFT
from tests.cases.inputs import ANSWER, TOOL, USER, load, texts, tokenizer_folder

ROW = {"prompt": "1+1=", "answer": "2"}
OTHER = {"prompt": "2+2=", "answer": "4"}
CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, row in (("hub/train", ROW), ("hub/test", OTHER), ("my data/rows", ROW), ("a", ROW)):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(row) + "\n")
    (tmp_path / "rows.JSONL").write_text(json.dumps(ROW))
    return tmp_path


# --- lists of sources -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sources",
    [
        ["hub"],
        ["hub/"],
        ["my data/rows.jsonl"],
        ["rows.JSONL"],
        ["a.json*"],
        ["hub", Path("a.jsonl")],
        {"train": {"train": "a.jsonl", "test": "hub"}},
    ],
)
def test_sources(sources: Any, folder: Path, files: Path) -> None:
    if "hub" in str(sources):
        pytest.importorskip("datasets")
    assert {row.answer for row in load("GRPO", sources, folder)} == {"2"}


@pytest.mark.parametrize(
    ("sources", "place"),
    [
        (["trl-lib/ultra"], "trl-lib/ultra"),
        (["rows.zip", "rows.xlsx"], "rows.zip"),
        (["my data/none.jsonl"], "my data/none.jsonl"),
        (["a.jsonl", "What is 1+1?"], "What is 1"),
        (["a.jsonl", ROW], "{'prompt'"),
    ],
)
def test_sources_refused(sources: Any, place: str, folder: Path, files: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        load("GRPO", sources, folder)
    assert f"data cannot be read ({place}" in str(caught.value)
    assert "pass texts as {'prompt': TEXT}" in str(caught.value)


def test_texts(folder: Path, files: Path) -> None:
    every = ["Explain main.py", "1/2", "3.5", "Is it yes/no?", "12*34=", "x.", "a.jsonl or b"]
    assert [row.entry["prompt"] for row in load("GRPO", every, folder)] == every


def test_lists_of_tables(folder: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frames = [pandas.DataFrame([ROW]), pandas.DataFrame([OTHER])]
    assert [row.answer for row in load("GRPO", frames, folder)] == ["2", "4"]
    with pytest.raises(TypeError, match="data of type list has tables and other values"):
        load("GRPO", [*frames, ROW], folder)


# --- splits ---------------------------------------------------------------------------------------


def test_held_out_split(folder: Path, files: Path) -> None:
    splits = {"train": [ROW], "test": [OTHER], "dev": [OTHER]}
    for data in (
        {"train": splits, "held_out_split": "test"},
        {"train": splits, "held_out_split": "dev", "split": "train"},
    ):
        recipe = SFT(str(folder), data)
        recipe.load()
        assert [row.entry for row in recipe.dataset.train] == [ROW]
        assert [row.entry for row in recipe.dataset.held_out] == [OTHER]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"train": [ROW], "held_out_split": "test"},
            r"no splits \(rows-1-.*is 'test', expected",
        ),
        ({"train": [ROW], "split": "dev"}, "no splits .*is 'dev'"),
        ({"train": "a.jsonl", "held_out_split": "test"}, r"no splits \(a.jsonl\).*is 'test'"),
        ({"train": ["a.jsonl"], "split": "validation"}, "no splits .*is 'validation'"),
        ({"train": "a.jsonl", "subset": "en"}, r"no subsets \(a.jsonl\): data.subset is 'en'"),
        ({"train": {"train": [ROW]}, "split": "dev"}, "has the splits train; expected 'dev'"),
        ({"train": {"prompt": "What is 2+2?"}}, "has the splits prompt; expected 'train'"),
        ({"train": {"train": {"prompt": ["a"]}}}, "has the splits prompt; expected 'train'"),
        ({"train": {"0": ROW}}, "has the splits 0; expected 'train'"),
    ],
)
def test_splits_refused(data: Any, message: str, folder: Path, files: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load("SFT", data, folder)


def test_saved_data_set_has_one_split(folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([ROW]).save_to_disk(str(tmp_path / "one"))
    assert len(load("SFT", tmp_path / "one", folder)) == 1
    for more in ({"split": "dev"}, {"held_out_split": "test"}, {"subset": "en"}):
        with pytest.raises(ValueError, match=r"expected '(dev|test)'|data.subset is 'en'"):
            load("SFT", {"train": str(tmp_path / "one"), **more}, folder)


# --- columns --------------------------------------------------------------------------------------


def _chat(arguments: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    return {"messages": [USER, {**ANSWER, "content": "", "tool_calls": calls}]}


def test_keys_of_other_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    model = tokenizer_folder(tmp_path / "model", CALLS)
    table = datasets.Dataset.from_list([_chat({"a": 1}), _chat({"b": 2})])
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    for data in (table, tmp_path / "rows.parquet", tmp_path / "saved"):
        first, second = load("SFT", data, model)
        assert texts(first, model) == ['{"a": 1}<eot>']
        assert texts(second, model) == ['{"b": 2}<eot>']
    (row,) = load("SFT", [_chat({"a": None})], model)
    assert texts(row, model) == ['{"a": null}<eot>']


@pytest.mark.parametrize("arguments", [[["a", "1"]], [("a", 1)], 7, ["a"]])
def test_arguments_of_other_form(arguments: Any, tmp_path: Path) -> None:
    model = tokenizer_folder(tmp_path, CALLS)
    with pytest.raises(ValueError, match=r"'messages'\[1\].tool_calls\[0\].function.arguments is"):
        load("SFT", [{**_chat(arguments), "tools": [TOOL]}], model)


# --- answers --------------------------------------------------------------------------------------


def by_column(completions: list[str], solution: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def by_label(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    return [0.0] * len(queries)


def by_truth(solution_str: str, ground_truth: Any) -> float:
    return 0.0


def optional(completion: str, answer: Any = None) -> float:
    return 0.0


def check(folder: Path, rows: list[Any], reward: Any, **data: Any) -> None:
    recipe = GRPO(str(folder), {"train": rows, **data}, [reward])
    recipe.load()
    recipe.check()


@pytest.mark.parametrize("reward", ["exact", "number", by_truth, by_label])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1", "solution": "2"},
        {"prompt": "1", "answer": None},
        {"prompt": "1", "answer": float("nan")},
        {"prompt": "1", "reward_model": "none"},
    ],
)
def test_answer_missing(reward: Any, row: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ValueError, match=r"\(data, row 2\): the reward .* requires '\w+', and the"):
        check(folder, [ROW, row], reward)


def test_answer_key(folder: Path) -> None:
    row = {"prompt": "1", "solution": "2"}
    check(folder, [row], "exact", answer_key="solution")
    with pytest.raises(ValueError, match=r"has 'prompt', 'solution', expected .*data.answer_key"):
        check(folder, [row], "exact", answer_key="solutoin")
    with pytest.raises(ValueError, match="requires 'solution'"):
        check(folder, [ROW], by_column)


def test_answer_given(folder: Path) -> None:
    check(folder, [{"prompt": "1", "solution": "2"}], by_column)
    check(folder, [{"prompt": "1"}], optional)
    check(folder, [{"prompt": "1"}], {"use": "format", "args": {"pattern": ".*"}})
    for truth in ({"ground_truth": "2"}, json.dumps({"ground_truth": "2"})):
        check(folder, [{"prompt": "1", "reward_model": truth}], "exact")
        assert load("GRPO", [{"prompt": "1", "reward_model": truth}], folder)[0].answer == "2"


def test_plan_checks_answers(folder: Path) -> None:
    recipe = GRPO(str(folder), [{"prompt": "1"}], ["exact"])
    with pytest.raises(ValueError, match="requires 'answer'"):
        recipe.plan()


@pytest.mark.parametrize(
    ("reward", "answer"), [("exact", 7.0), ("exact", 1.1), ("number", float("inf"))]
)
def test_floats_refused_by_rewards(reward: str, answer: float, folder: Path) -> None:
    with pytest.raises(ValueError, match="takes texts and whole numbers, and the answer is"):
        check(folder, [{"prompt": "1", "answer": answer}], reward)


@pytest.mark.parametrize("answer", [7.0, float("inf"), float("-inf"), 1e22])
def test_floats_refused_as_answers(answer: float, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"\(data, row 1\): an answer is the float .*, expected a"):
        load("SFT", [{"prompt": "1", "answer": answer}], folder)
    with pytest.raises(ValueError, match="an answer is the float"):
        load("DPO", [{"prompt": "1", "chosen": answer, "rejected": "no"}], folder)
