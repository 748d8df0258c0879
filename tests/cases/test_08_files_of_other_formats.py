"""Files of the formats that users of other systems have are read, or named with a next step."""

from __future__ import annotations

import gzip
import importlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.cases.inputs import load

ROWS = [{"prompt": "1+1=", "answer": "2"}]
LINE = json.dumps(ROWS[0])
HAS_DATASETS = importlib.util.find_spec("datasets") is not None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.json", json.dumps(ROWS, indent=1).encode()),
        ("rows.json", LINE.encode()),
        ("rows.json", json.dumps(ROWS[0], indent=2).encode()),
        ("rows.jsonl", json.dumps(ROWS).encode()),
        ("rows.jsonl", f"\n\r\n{LINE}\r\n".encode("utf-8-sig")),
        ("rows.jsonl", LINE.encode("utf-16")),
        ("rows.jsonl", LINE.replace("}", ', "score": NaN}').encode()),
        ("rows.jsonl.gz", gzip.compress(LINE.encode(), mtime=0)),
        ("rows.JSONL", LINE.encode()),
        ("rows", LINE.encode()),
        ("rows.v1.ndjson", LINE.encode()),
        ("rows.csv", b"prompt,answer\n1+1=,2\n"),
        ("rows.tsv", b"prompt\tanswer\n1+1=\t2\n"),
        ("rows.csv.gz", gzip.compress(b'prompt,answer\n"1+1=","2"\n', mtime=0)),
    ],
)
def test_read(name: str, content: bytes, folder: Path, tmp_path: Path) -> None:
    if "sv" in name and not HAS_DATASETS:
        pytest.skip("needs pip install 'helmsman-rl[data]'")
    (tmp_path / name).write_bytes(content)
    (row,) = load("GRPO", tmp_path / name, folder)
    assert (row.entry["prompt"], row.answer) == ("1+1=", "2")


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rows.jsonl", LINE)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.parquet", b"PAR1" + bytes(range(256)) + b"PAR1", "expected the format .parquet"),
        ("rows.arrow", b"no arrow", "expected the format .arrow"),
        (
            "rows.jsonl",
            gzip.compress(LINE.encode(), mtime=0),
            "codec can't decode.*expected the format .jsonl",
        ),
        ("rows.jsonl", LINE.replace("1", "é").encode("latin-1"), "codec can't decode"),
        ("rows.jsonl.gz", LINE.encode(), "expected the format .jsonl"),
        (
            "rows.csv",
            "prompt\né\n".encode("latin-1"),
            "codec can't decode.*expected the format .csv",
        ),
        ("rows.jsonl.zip", zipped, "it ends in .zip, expected one of .jsonl, "),
        ("rows.xlsx", b"PK", "it ends in .xlsx, expected one of .jsonl, "),
        ("rows.pkl", b"", "it ends in .pkl, expected one of .jsonl, "),
        ("rows.jsonl", b"\n", "data has no usable row"),
        ("rows.json", b"[]", "data has no usable row"),
        ("rows.json", b'{"data": [1', r"line 1\): the line is not JSON"),
        ("rows.json", b'{"data": [{"prompt": "1"}]}', r"row 1\): the row has 'data'"),
        (
            "rows.jsonl",
            b"[1, 2]\n[3,\n",
            r"line 1\): 'prompt' is \[1, 2\]|line 2\): the line is not",
        ),
        ("rows.csv", b"prompt;answer\n1+1=;2\n", r"row 1\): the row has 'prompt;answer'"),
    ],
)
def test_refused(name: str, content: Any, message: str, folder: Path, tmp_path: Path) -> None:
    if name.endswith((".parquet", ".arrow", ".csv")) and not HAS_DATASETS:
        pytest.skip("needs pip install 'helmsman-rl[data]'")
    path = tmp_path / name
    content(path) if callable(content) else path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load("GRPO", path, folder)
    assert str(path) in str(caught.value)


def test_texts_stay_texts(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    answers: list[Any] = ["007", "2026-01-31", "null", "1e5", "[1]", 7, None]
    path.write_text("".join(json.dumps({"prompt": "x", "answer": each}) + "\n" for each in answers))
    assert [row.answer for row in load("GRPO", path, folder)] == answers
