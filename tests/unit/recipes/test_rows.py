"""Test rows in every form that recipes read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helmsman.api.errors import BackendNotInstalledError
from helmsman.recipes.rows import read_rows, rows_of, source_name


def test_rows_of_iterables() -> None:
    assert rows_of(str(number) for number in range(3)) == ["0", "1", "2"]
    assert source_name(["1"]) != source_name(["2"])
    with pytest.raises(ValueError, match="data has no rows"):
        rows_of(iter(()))


def test_read_rows_names_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BackendNotInstalledError, match=r"pip install 'helmsman\[data\]'"):
        list(read_rows(str(tmp_path), None, "prompt"))


def test_read_rows_of_dataset_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "files").mkdir()
    made.to_parquet(str(tmp_path / "files" / "train.parquet"))
    for name in ("saved", "files"):
        assert [row for _, row in read_rows(str(tmp_path / name), None, "prompt")] == rows
    datasets.DatasetDict(a=made, b=made).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(ValueError, match="has the splits a, b; expected 'train', or one split"):
        list(read_rows(str(tmp_path / "two"), None, "prompt"))
