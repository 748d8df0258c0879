"""Data whose iteration does not give rows is read as meant, or refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.cases.inputs import load

ROWS = [{"prompt": "1+1=", "answer": "2"}]


class Frame:
    """Iterates over its columns, as frames do; not known to Helmsman."""

    columns = ("prompt", "answer")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


class Records(Frame):
    """One that gives its rows as pandas does."""

    def to_dict(self, orient: str = "dict") -> list[dict[str, Any]]:
        assert orient == "records"
        return ROWS


class Indexed:
    """A data set of torch's kind, without __iter__."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return ROWS[index]

    def __len__(self) -> int:
        return len(ROWS)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


def test_files(files: list[Path], folder: Path) -> None:
    one, other = files
    every: list[Any] = [files, tuple(files), [str(one), str(other)], iter(files), [one, str(other)]]
    every += [one.parent / "*.jsonl", {"train": files}, {"train": files[:1], "held_out": files[1:]}]
    for data in every:
        found = load("GRPO", data, folder)
        assert [row.answer for row in found] == ["2"] * len(found)
        assert [row.source for row in found][:1] == ["a"]


@pytest.mark.parametrize("data", [Records(), (row for row in ROWS), {"train": iter(ROWS)}])
def test_rows(data: Any, folder: Path) -> None:
    assert [row.answer for row in load("GRPO", data, folder)] == ["2"]


def test_held_out_rows(folder: Path) -> None:
    found = load("SFT", {"train": ROWS, "held_out": [{"prompt": "2+2=", "answer": "4"}]}, folder)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Frame(), "data is of type Frame, expected paths, a table or an iterable of rows"),
        (Indexed(), "data is of type Indexed, expected paths, a table or"),
        (7, "data is of type int"),
        (b"rows.jsonl", "data is of type bytes"),
        ([], "data of type list has no rows"),
        (["a.jsonl", "b.jsonl"], r"data cannot be read \(a.jsonl\): no such file or folder"),
        (["1+1=", 7], r"\(data, row 2\): 'prompt' is 7, expected"),
        ([["1+1="], ["2+2="]], r"\(data, row 1\): 'prompt' is \['1\+1='\], expected"),
        (itertools.repeat(("prompt", "1+1="), 2), r"\(data, row 1\): 'prompt' is \['prompt'"),
        (numpy.array([[0.5, 0.5]]), r"\(data, row 1\): 'prompt' is \[0.5, 0.5\]"),
        ([{"train": ROWS}], r"\(data, row 1\): the row has 'train', expected 'prompt'"),
        ({"prompt": ["1+1="], "answer": ["2"]}, "there is no setting 'data.prompt'"),
        ("What is 1+1?", r"data cannot be read \(What is 1\+1\?\): no such file or folder"),
    ],
)
def test_refused(data: Any, message: str, folder: Path) -> None:
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        load("GRPO", data, folder)
