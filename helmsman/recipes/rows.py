"""Reads rows from files, dataset folders, tables and Python objects, as plain Python values."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from helmsman.api.extras import needed_by

TEXTS = (".jsonl", ".ndjson", ".json", ".txt")
TABLES = (".csv", ".tsv", ".parquet", ".arrow")
FORMATS = TEXTS + TABLES
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Endings that may follow those of text formats."""
_ENDING = f"({'|'.join(map(re.escape, FORMATS + COMPRESSED))})"
_FILE = re.compile(rf"\S+{_ENDING}", re.IGNORECASE)
_SOURCE = re.compile(rf".*{_ENDING}|\S*\.[a-z]\w*|[a-z][\w.-]*/[\w.-]*", re.IGNORECASE)
"""Names of files, and texts that end as one or are the name of a data set on the Hub."""


class RowError(ValueError):
    """A row that cannot be used; the message names the field."""


def unlike(field: str, value: Any, expected: str) -> RowError:
    """Return the error of a field that has another value than expected."""
    found = "null" if value is None else f"{value!r:.80}"
    return RowError(f"{field} is {found}, expected {expected}")


def without(keys: Iterable[str], expected: str) -> RowError:
    """Return the error of a row that has other keys than expected."""
    return RowError(f"the row has {', '.join(map(repr, keys)) or 'no values'}, expected {expected}")


def plain(value: Any, in_list: bool | None = None) -> Any:
    """Convert values of NumPy, pandas, pyarrow, polars and torch to plain Python, at any depth.

    Arrays and tuples become lists. NaN, NaT and pandas' NA become None.

    Args:
        value: The value.
        in_list: For a value of a column, whether it is inside of a list. All structs of a column
            have the keys of each of them, so null keys of structs in lists are left out.
    """
    if value is None or type(value) in (int, bool, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of a subclass, such as an enum
    if isinstance(value, float):
        return float(value) if value == value else None
    if isinstance(value, Mapping):
        made = {plain(key): plain(each, in_list) for key, each in value.items()}
        return {key: each for key, each in made.items() if each is not None or not in_list}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(each, None if in_list is None else True) for each in value]
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    for name in ("as_py", "to_pylist", "to_list", "tolist", "to_pydatetime", "to_pytimedelta"):
        if callable(convert := getattr(value, name, None)):
            return plain(convert(), in_list)
    return value


def source_of(
    data: Any, split: str | None, default: str, most_rows: int = 5_000_000
) -> tuple[Any, list[Any] | None]:
    """Return the source and the rows of data that a script passes.

    Args:
        data: A path, several paths, a table, or an iterable of rows.
        split: Split to take if the data has splits.
        default: Split to take if ``split`` is None.
        most_rows: Limit on the rows, since an iterable may have no end.

    Returns:
        The path or paths, and None; or a name made from the content of the rows, and the rows.

    Raises:
        ValueError: The data has no rows, no end or no such split.
        TypeError: The data is not a table and not an iterable of rows.
    """
    if isinstance(data, str | os.PathLike):
        return os.fspath(data), None
    where, is_columnar = f"data of type {type(data).__name__}", _is_table(data)
    if isinstance(data, Mapping):
        name = split or (None if is_columnar else default)  # a mapping of columns has no splits
        return source_of(pick(data, name, default, where), None, default)
    found = data
    if hasattr(data, "columns"):  # iterating over a table yields columns, or their names
        ways = (("to_pylist",), ("to_dicts",), ("to_dict", "records"))
        found = next((getattr(data, way)(*how) for way, *how in ways if hasattr(data, way)), None)
    if not isinstance(found, Iterable) or isinstance(found, bytes):
        kind = type(data).__name__
        raise TypeError(f"data is of type {kind}, expected paths, a table or an iterable of rows")
    rows = list(itertools.islice(found, most_rows + 1))
    if not 0 < len(rows) <= most_rows:
        most = f"more than {most_rows:,} rows or no end; write them to files"
        raise ValueError(f"{where} has {most if rows else 'no rows'}; expected at least one")
    if all(map(_is_table, rows)):
        rows = [row for each in rows for row in source_of(each, None, default)[1] or ()]
    elif any(map(_is_table, rows)):
        raise TypeError(f"{where} has tables and other values, expected one of them")
    else:
        rows = list(_columnar(rows) if is_columnar else map(plain, rows))
    if _are_sources(rows):
        return tuple(map(str, rows)), None
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    return f"rows-{len(rows)}-{digest[:12]}", rows


def _is_table(value: Any) -> bool:
    """Return whether a value is a table or a data set."""
    return hasattr(type(value), "columns") or hasattr(type(value), "column_names")


def _are_sources(rows: Sequence[Any]) -> bool:
    """Return whether one of the rows names a file or folder, or all of them may do so."""
    texts = [each for each in rows if isinstance(each, str)]
    if any(_FILE.fullmatch(each) or os.path.exists(each) for each in texts):
        return True
    if len(texts) < len(rows):
        return any(isinstance(each, os.PathLike) for each in rows)
    return all(_SOURCE.fullmatch(x) or (glob.has_magic(x) and glob.glob(x)) for x in texts)


def paths_of(source: str | Sequence[str]) -> Sequence[str]:
    """Return the paths of a source that may be a single one."""
    return [source] if isinstance(source, str) else source


def pick(splits: Mapping[Any, Any], split: str | None, default: str, where: str) -> Any:
    """Return the given split, else the default one, else the only one.

    Args:
        splits: Splits by name.
        split: Name of the split, if one is given.
        default: Name of the split that is taken otherwise.
        where: Origin of the splits, for the message.

    Raises:
        ValueError: There is no such split.
    """
    name = split or (default if default in splits or len(splits) != 1 else next(iter(splits)))
    if name not in splits:
        found = f"{where} has the splits {', '.join(map(str, splits))}"
        advice = "Set data.split or data.held_out_split"
        raise ValueError(f"{found}; expected {name!r}, or one split. {advice}.")
    return splits[name]


def read_rows(
    source: str | Sequence[str],
    given: Mapping[Any, list[Any]],
    split: str | None = None,
    default: str = "train",
    subset: str | None = None,
) -> Iterator[tuple[str, str, Any]]:
    """Yield (name of the file, place, row or error).

    Args:
        source: A file, a pattern of files, a dataset folder, several of these, or a key of
            ``given``.
        given: Rows that a script passed, by name.
        split: Split of dataset folders.
        default: Split to take if ``split`` is None.
        subset: Subset (configuration) of dataset folders.

    Raises:
        ValueError: The content of a file does not fit its ending.
        OSError: A file cannot be read.
        BackendNotInstalledError: The package ``datasets`` is needed and missing.
    """
    for path in paths_of(source):
        if os.path.isdir(path) and path not in given:
            parts = _parts_of_folder(path, split, default, subset)
        elif split not in (None, default):
            raise ValueError(
                f"data has no splits ({path}): data.split or data.held_out_split is {split!r}, "
                "expected null. Give the source of the split by data.train or data.held_out."
            )
        elif path in given:
            parts = [("data", _numbered(given[path]))]
        elif files := [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True)):
            parts = [(file, _rows_in(file)) for file in files]
        else:
            raise FileNotFoundError(
                f"data cannot be read ({path:.200}): no such file or folder, expected a local one. "
                "Get data from the Hub by `hf download NAME --repo-type dataset --local-dir "
                "FOLDER`, and pass texts as {'prompt': TEXT} or {'text': TEXT}."
            )
        for where, rows in parts:
            name = Path(path if path in given else where).stem
            yield from ((name, f"{where}, {label}", plain(row)) for label, row in rows)


def _columnar(rows: Iterable[Any]) -> Iterator[Any]:
    return (plain(row, in_list=False) for row in rows)


def _numbered(rows: Iterable[Any], word: str = "row") -> Iterator[tuple[str, Any]]:
    return ((f"{word} {number}", row) for number, row in enumerate(rows, start=1))


def _datasets(what: str) -> Any:
    with needed_by(what, "datasets"):
        import datasets
    return datasets


def _parts_of_folder(
    folder: str, split: str | None, default: str, subset: str | None
) -> list[tuple[str, Iterator[tuple[str, Any]]]]:
    """Return (path, numbered rows) of each file."""
    datasets = _datasets("a Hugging Face dataset folder")
    try:
        if any(Path(folder, name).is_file() for name in ("state.json", "dataset_dict.json")):
            if subset is not None:
                raise ValueError(f"data.subset is {subset!r}, and it has no subsets")
            saved = datasets.load_from_disk(folder)
            splits = saved if isinstance(saved, Mapping) else {default: saved}
            return [(folder, _numbered(_columnar(pick(splits, split, default, folder))))]
        files = datasets.load_dataset_builder(folder, name=subset).config.data_files
        return [(each, _rows_in(each)) for each in pick(files, split, default, folder)]
    except Exception as error:  # readers of datasets may raise any exception
        raise ValueError(f"{folder} cannot be read as a Hugging Face dataset: {error}") from error


def _rows_in(file: str) -> Iterator[tuple[str, Any]]:
    """Yield (label, row or error) of a file."""
    ends = [each.lower() for each in Path(file).suffixes[-2:]] or [".jsonl"]
    kind = ends[0] if ends[-1] in COMPRESSED else ends[-1]
    datasets = _datasets(f"a file of the format {kind}") if kind in TABLES else None
    try:
        if kind not in FORMATS:
            raise ValueError(f"it ends in {kind}")
        yield from _numbered(_table(file, kind, datasets)) if datasets else _lines(file, kind)
    except Exception as error:  # readers may raise any exception
        reason = " ".join(str(error).split())
        expected = f"the format {kind}" if kind in FORMATS else f"one of {', '.join(FORMATS)}"
        raise ValueError(
            f"data cannot be read ({file}): {reason}, expected {expected}. Convert it, or pass its "
            "rows."
        ) from error


def _table(file: str, kind: str, datasets: Any) -> Any:
    """Return the rows of a table.

    ``datasets`` would turn a text in JSON or CSV that looks like a number or a date into one: the
    answer "007" becomes 7. So JSON is decoded here, and the cells of CSV are read as texts.
    """
    if kind in (".parquet", ".arrow"):
        where = {"data_files": [glob.escape(file)], "split": "train", "streaming": True}
        return _columnar(datasets.load_dataset(kind[1:], **where))
    import pandas  # datasets depends on it

    cells: Any = {"dtype": str, "keep_default_na": False, "na_values": [""]}
    table = pandas.read_csv(file, sep="," if kind == ".csv" else "\t", **cells)
    if not isinstance(table.index, pandas.RangeIndex):
        raise ValueError("rows have more cells than the header")
    return table.to_dict("records")


def _lines(file: str, kind: str) -> Iterator[tuple[str, Any]]:
    import fsspec  # transformers depends on it

    with fsspec.open(file, "rb", compression="infer") as opened:
        content = opened.read()
    text = content.decode(json.detect_encoding(content))
    if kind == ".json" or (kind != ".txt" and text.lstrip().startswith("[")):
        with contextlib.suppress(json.JSONDecodeError):  # a row per line
            found = json.loads(text)
            yield from _numbered(found if isinstance(found, list) else [found])
            return
    for label, line in _numbered(text.replace("\r\n", "\n").split("\n"), "line"):
        if line.strip():
            try:
                row = {"text": line} if kind == ".txt" else json.loads(line)
            except ValueError as error:
                row = RowError(f"the line is not JSON ({error}), expected a row")
            yield label, row
