"""Rows of tables and data sets, whose libraries import torch."""

from __future__ import annotations

import csv
import datetime
from pathlib import Path
from typing import Any

import pytest

from helmsman.recipes import SFT
from helmsman.recipes.rows import plain
from tests.unit.recipes.test_rows import ROWS, read, write

datasets = pytest.importorskip("datasets")
pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")


def test_source_of_tables() -> None:
    frame = pandas.DataFrame(ROWS)
    data_set = datasets.Dataset.from_list(ROWS)
    tables = [frame, pyarrow.table(frame), pyarrow.RecordBatch.from_pylist(ROWS), data_set]
    tables += [data_set.to_iterable_dataset(), datasets.DatasetDict(train=data_set, test=[])]
    for table in tables:
        assert read(table) == ROWS
    assert read(data_set.with_format("numpy")) == ROWS
    assert read(frame["prompt"]) == [row["prompt"] for row in ROWS]
    with pytest.raises(ValueError, match="data of type DatasetDict has the splits a, b; expected"):
        read(datasets.DatasetDict(a=data_set, b=data_set))


def test_plain_tables() -> None:

    assert plain(pandas.NA) is None
    assert plain(pandas.NaT) is None
    when = plain(pandas.Timestamp("2026-01-31"))
    assert (when, type(when)) == (datetime.datetime(2026, 1, 31), datetime.datetime)
    assert plain(pandas.Series([1, 2])) == [1, 2]
    assert plain(pyarrow.scalar([{"a": 1}])) == [{"a": 1}]


def test_read_rows_of_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows: list[dict[str, Any]] = [
        {"prompt": 'a, "b"\nc', "answer": "007"},
        {"prompt": "None", "answer": None},
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ("prompt", "answer"))
        writer.writeheader()
        writer.writerows(rows)
    assert read(path) == rows
    (tmp_path / "rows.tsv").write_text("prompt\tanswer\n1,5\t2\n")
    assert read(tmp_path / "rows.tsv") == [{"prompt": "1,5", "answer": "2"}]
    for text, message in (
        ("1,2\n1,2,3\n", "Expected 2 fields in line 3, saw 3"),
        ("1,2,3\n", "more cells than the header"),
    ):
        path.write_text(f"prompt,answer\n{text}")
        with pytest.raises(ValueError, match=rf"rows.csv\): .*{message}, expected the format .csv"):
            read(path)


def test_read_rows_of_parquet_and_arrow(tmp_path: Path) -> None:

    rows = [{"messages": [{"role": "user", "content": "x", "n": 1}]}]
    made = datasets.Dataset.from_list(rows)
    made.to_parquet(str(tmp_path / "rows[1].parquet"))
    assert read(tmp_path / "rows[1].parquet") == rows
    made.save_to_disk(str(tmp_path / "saved"))
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    assert read(arrow) == rows
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"bad.parquet\): .*, expected the format .parquet"):
        read(tmp_path / "bad.parquet")


def test_read_rows_of_saved_folders(tmp_path: Path) -> None:

    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved") == ROWS
    datasets.DatasetDict(a=made, b=made.select([0])).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(ValueError, match="has the splits a, b; expected 'train', or one split"):
        read(tmp_path / "two")
    assert read(tmp_path / "two", split="b") == ROWS[:1]


def test_read_rows_of_folders_of_files(tmp_path: Path) -> None:
    for name, rows in (("train-00000-of-00002", ROWS[:1]), ("train-00001-of-00002", ROWS[1:])):
        write(tmp_path / "shards" / "data" / f"{name}.jsonl", rows)
    write(tmp_path / "shards" / "data" / "test-00000-of-00001.jsonl", ROWS[:1])
    assert read(tmp_path / "shards") == ROWS
    assert read(tmp_path / "shards", split="test") == ROWS[:1]
    assert read(tmp_path / "shards", default="test") == ROWS[:1]
    with pytest.raises(
        ValueError, match="has the splits train, test; expected 'dev', or one split"
    ):
        read(tmp_path / "shards", split="dev")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty cannot be read as a Hugging Face dataset: The dir"):
        read(tmp_path / "empty")


def test_read_rows_of_folder_with_subsets(tmp_path: Path) -> None:
    write(tmp_path / "a" / "x.jsonl", ROWS[:1])
    write(tmp_path / "b" / "x.jsonl", ROWS[1:])
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in "ab")
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert read(tmp_path, subset="b") == ROWS[1:]
    with pytest.raises(ValueError, match="pick one among the available configs: .'a', 'b'"):
        read(tmp_path)


def test_recipe_of_data_sets(model: Path) -> None:
    made = datasets.DatasetDict(
        train=datasets.Dataset.from_list([{"prompt": "1+1=", "answer": "2"}] * 3),
        test=datasets.Dataset.from_list([{"prompt": "2+2=", "answer": "4"}]),
    )
    whole = SFT(model, made)
    parts = SFT(model, {"train": made["train"], "held_out": made["test"]})
    chosen = SFT(model, {"train": made, "split": "test"})
    for recipe, sizes in ((whole, (3, 0)), (parts, (3, 1)), (chosen, (1, 0))):
        recipe.load()
        assert (len(recipe.dataset.train), len(recipe.dataset.held_out)) == sizes


def test_recipe_of_splits_of_a_folder(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1=", "answer": number} for number in range(4)]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", rows[:1])
    recipe = SFT(model, {"train": tmp_path, "held_out_split": "test"})
    recipe.load()
    assert (len(recipe.dataset.train), len(recipe.dataset.held_out)) == (4, 1)
    assert recipe.dataset.num_in_both == 1
