"""Rows of every form that recipes read."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from helmsman.api.errors import BackendNotInstalledError
from helmsman.recipes.prompts import ChatTokenizer, load_dataset
from helmsman.recipes.rows import read_rows, rows_of, source_name
from helmsman.recipes.settings import Data
from helmsman.recipes.tiny_model import make_tokenizer

CHAT = [{"role": "user", "content": "1+1="}]
has_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="needs pip install 'helmsman[data]'"
)


def test_read_rows_of_every_form(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model")
    tokenizer = ChatTokenizer(str(tmp_path / "model"), Data(train=""))
    rows = ["1+1=", CHAT, [4, 5, 6], {"prompt": "2+2=", "answer": "4"}]
    found = load_dataset(Data(train="rows"), tokenizer, 0, rows).train
    assert [row.prompt for row in found[:2]] == ["<user>1+1=\n<assistant>"] * 2
    assert found[2].prompt_ids == [4, 5, 6]
    assert found[3].answer == "4"
    with pytest.raises(ValueError, match="row 2 of the data: 'prompt' is 7; expected a text"):
        load_dataset(Data(train="rows"), tokenizer, 0, ["x", 7])


def test_answer_of_rows_made_for_verl(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model")
    tokenizer = ChatTokenizer(str(tmp_path / "model"), Data(train=""))
    row = {"prompt": CHAT, "data_source": "sums", "reward_model": {"ground_truth": "2"}}
    (found,) = load_dataset(Data(train="rows"), tokenizer, 0, [row]).train
    assert (found.answer, found.source) == ("2", "sums")


def test_rows_of_iterables() -> None:
    assert rows_of(str(number) for number in range(3)) == ["0", "1", "2"]
    assert source_name(["1"]) != source_name(["2"])
    with pytest.raises(ValueError, match="data has no rows"):
        rows_of(iter(()))


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="it is installed")
def test_dataset_folder_names_install_command(tmp_path: Path) -> None:
    with pytest.raises(BackendNotInstalledError, match=r"pip install 'helmsman\[data\]'"):
        list(read_rows(str(tmp_path), None, "prompt"))


@has_datasets
def test_dataset_folders(tmp_path: Path) -> None:
    import datasets

    rows: list[dict[str, Any]] = [
        {"prompt": "1+1=", "answer": "2"},
        {"prompt": "2+2=", "answer": "4"},
    ]
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "files").mkdir()
    made.to_parquet(str(tmp_path / "files" / "train.parquet"))
    for name in ("saved", "files"):
        assert [row for _, row in read_rows(str(tmp_path / name), None, "prompt")] == rows
    datasets.DatasetDict(a=made, b=made).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(ValueError, match="has the splits a, b; expected 'train', or one split"):
        list(read_rows(str(tmp_path / "two"), None, "prompt"))
