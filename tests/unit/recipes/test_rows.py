"""Rows of all kinds of data, as plain Python values."""

from __future__ import annotations

import bz2
import collections
import enum
import gzip
import itertools
import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helmsman.api.errors import BackendNotInstalledError
from helmsman.recipes.rows import RowError, plain, read_rows, source_of

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
CHAT = [{"role": "user", "content": "1+1="}]


def read(source: Any, **options: Any) -> list[Any]:
    """Return the rows of a file, a folder or Python objects."""
    path, rows = source_of(source, None, "train")
    given = {} if rows is None else {path: rows}
    return [entry for _, _, entry in read_rows(path, given, **options)]


def write(path: Path, rows: list[Any] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Role(str, enum.Enum):  # noqa: UP042 - str() of it is another text
    USER = "user"


def test_plain_numpy_and_subclasses() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.array(
        [{"n": numpy.int64(3), "x": numpy.array([1.5, float("nan")])}], dtype=object
    )
    found = plain({"a": array, "b": (Role.USER, numpy.str_("x")), "c": numpy.bool_(True)})
    assert found == {"a": [{"n": 3, "x": [1.5, None]}], "b": ["user", "x"], "c": True}
    assert type(found["b"][0]) is type(found["b"][1]) is str
    assert plain(numpy.datetime64("NaT")) is None
    assert plain(collections.OrderedDict(a=range(2))) == {"a": [0, 1]}


def test_source_of_iterables() -> None:
    assert read(str(n) for n in range(2)) == ["0", "1"]
    assert read([CHAT, (4, 5), ROWS[0]]) == [CHAT, [4, 5], ROWS[0]]
    assert source_of(["1"], None, "train")[0] != source_of(["2"], None, "train")[0]
    assert source_of(["\ud800"], None, "train")[0].startswith("rows-1-")


def test_source_of_polars_frame() -> None:
    polars = pytest.importorskip("polars")
    assert read(polars.DataFrame(ROWS)) == ROWS


class Columns:
    """A table of a library that is not known."""

    columns = ("prompt", "answer")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "data is of type int, expected paths, a table or an iterable of rows"),
        (b"1+1=", "data is of type bytes"),
        (Columns(), "data is of type Columns"),
        ([], "data of type list has no rows"),
        (iter(()), "data of type tuple_iterator has no rows"),
        ({"prompt": ["1+1="]}, "data of type dict has the splits prompt"),
    ],
)
def test_source_of_other_data(data: Any, message: str) -> None:
    if data == {"prompt": ["1+1="]}:
        data = {"prompt": ["1+1="], "answer": ["2"]}
    with pytest.raises((TypeError, ValueError), match=message):
        source_of(data, None, "train")


def test_source_of_endless_iterable() -> None:
    with pytest.raises(ValueError, match="data of type cycle has more than 100 rows or no end"):
        source_of(itertools.cycle(ROWS), None, "train", most_rows=100)


def test_read_rows_of_several_files(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", ROWS[:1]), write(tmp_path / "b.jsonl", ROWS[1:])
    for source in ((a, b), [str(a), str(b)], str(tmp_path / "*.jsonl"), tmp_path.glob("?.jsonl")):
        assert sorted(read(source), key=str) == ROWS
    found = list(read_rows((str(a), str(b)), {}))
    assert [(name, place) for name, place, _ in found] == [
        ("a", f"{a}, line 1"),
        ("b", f"{b}, line 1"),
    ]
    with pytest.raises(FileNotFoundError, match=r"cannot be read \(.*c.jsonl\): no such file"):
        read([a, tmp_path / "c.jsonl"])
    with pytest.raises(FileNotFoundError, match="hf download NAME --repo-type dataset"):
        read("openai/gsm8k")


@pytest.mark.parametrize(
    ("name", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)]
)
def test_read_rows_of_compressed_file(tmp_path: Path, name: str, pack: Any) -> None:
    path = tmp_path / f"rows.jsonl.{name}"
    path.write_bytes(pack(write(tmp_path / "rows.jsonl").read_bytes()))
    assert read(path) == ROWS


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_read_rows_of_encoding(tmp_path: Path, encoding: str, ending: str) -> None:
    rows = [{"prompt": "é\u2028😀", "answer": None, "n": 1.5}]
    text = json.dumps(rows[0] if ending == "jsonl" else rows, ensure_ascii=False)
    path = tmp_path / f"rows.{ending}"
    path.write_bytes(text.encode(encoding))
    assert read(path) == rows


def test_read_rows_of_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for text in (
        json.dumps(ROWS, indent=1),
        "\n".join(map(json.dumps, ROWS)),
        "\r\n\r\n".join(map(json.dumps, ROWS)),
    ):
        path.write_text(text)
        assert read(path) == ROWS
    path.write_text(json.dumps(ROWS[0], indent=1))
    assert read(path) == ROWS[:1]
    path.write_text('["1+1=", NaN]')
    assert read(path) == ["1+1=", None]
    path.write_text('{"prompt": "x"\n')
    (error,) = read(path)
    assert str(error).startswith("the line is not JSON (Expecting")


def test_read_rows_keeps_texts_in_json(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "answer": text} for text in ("007", "2026-01-31", "null", "1e5", "[1]")]
    assert read(write(tmp_path / "rows.jsonl", [*rows, {"prompt": "x", "answer": 7}]))[:5] == rows


def test_read_rows_malformed_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1"}\n{\n{"prompt": "2"}\n')
    first, error, last = read(path)
    assert (first, last) == ({"prompt": "1"}, {"prompt": "2"})
    assert isinstance(error, RowError)


def test_read_rows_of_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("one\r\n\ntwo [1]\n")
    assert read(path) == [{"text": "one"}, {"text": "two [1]"}]


@pytest.mark.parametrize("name", ["rows.xlsx", "rows.pt", "rows.zip", "rows.jsonl.zip"])
def test_read_rows_of_other_format(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    message = (
        rf"{name}\): it ends in \.\w+, expected one of .jsonl, .* Convert it, or pass its rows"
    )
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_read_rows_damaged_compression(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    for content in (b"no gzip", gzip.compress(b"{}" * 99)[:-12]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot be read \(.*rows.jsonl.gz\): "):
            read(path)


def test_read_rows_names_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "rows.csv").write_text("prompt\n1\n")
    for source in (tmp_path, tmp_path / "rows.csv"):
        with pytest.raises(BackendNotInstalledError, match=r"pip install 'helmsman-rl\[data\]'"):
            read(source)


def test_is_path_only_of_files() -> None:
    texts = ["Explain main.py", "what is a.json ?", "and / or"]
    assert source_of(texts, None, "train")[1] == texts
