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

from helmsman.api.errors import BackendNotInstalledError
from helmsman.api.extras import needed_by

TEXTS = (".jsonl", ".ndjson", ".json", ".txt")
FORMATS = (*TEXTS, ".csv", ".tsv", ".parquet", ".arrow")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Endings that may follow those of text formats."""
_SOURCE = re.compile(
    rf".*({'|'.join(map(re.escape, FORMATS + COMPRESSED))})"
    r"|\S*\.[a-z]\w*|[a-z][\w.-]*/[\w.-]*",
    re.IGNORECASE,
)
"""A text that ends as the name of a file does, or is the name of a data set on the Hub."""


class RowError(ValueError):
    """A row that cannot be used; the message names the field."""


def unlike(field: str, value: Any, expected: str) -> RowError:
    """Return the error of a field that has another value than expected."""
    return RowError(
        f"{field} is {'null' if value is None else f'{value!r:.80}'}, expected {expected}"
    )


def plain(value: Any) -> Any:
    """Convert values of NumPy, pandas, pyarrow, polars and torch to plain Python, at any depth.

    Arrays and tuples become lists. NaN, NaT and pandas' NA become None.
    """
    if value is None or type(value) in (int, bool, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of a subclass, such as an enum
    if isinstance(value, float):
        return float(value) if value == value else None
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(each) for each in value]
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    for name in ("as_py", "to_pylist", "to_list", "tolist", "to_pydatetime", "to_pytimedelta"):
        if callable(convert := getattr(value, name, None)):
            return plain(convert())
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
    kind = type(data).__name__
    if isinstance(data, Mapping):
        is_data_set = hasattr(type(data), "column_names")
        name = split or (None if is_data_set else default)  # a mapping of columns has no splits
        return source_of(pick(data, name, default, f"data of type {kind}"), None, default)
    is_columnar = _is_table(data)
    if hasattr(data, "columns"):  # iterating over a table yields columns, or their names
        ways = (("to_pylist",), ("to_dicts",), ("to_dict", "records"))
        data = next((getattr(data, name)(*how) for name, *how in ways if hasattr(data, name)), None)
    if not isinstance(data, Iterable) or isinstance(data, bytes):
        raise TypeError(f"data is of type {kind}, expected paths, a table or an iterable of rows")
    rows = list(itertools.islice(data, most_rows + 1))
    if not 0 < len(rows) <= most_rows:
        found = (
            f"more than {most_rows:,} rows or no end; write them to files" if rows else "no rows"
        )
        raise ValueError(f"data of type {kind} has {found}; expected at least one")
    if all(map(_is_table, rows)):
        rows = [row for each in rows for row in source_of(each, None, default)[1] or ()]
    elif any(map(_is_table, rows)):
        raise TypeError(f"data of type {kind} has tables and other values, expected one of them")
    else:
        rows = list(map(_of_columns if is_columnar else plain, rows))
    if any(map(_is_path, rows)) or all(map(_may_be_source, rows)):
        return tuple(map(str, rows)), None
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    return f"rows-{len(rows)}-{digest[:12]}", rows


def _is_table(value: Any) -> bool:
    """Return whether a value is a table or a data set."""
    return hasattr(type(value), "columns") or hasattr(type(value), "column_names")


def _is_path(value: Any) -> bool:
    """Return whether an item names a file or folder, so that the others must do so, too."""
    if not isinstance(value, str):
        return isinstance(value, os.PathLike)
    is_file = value.lower().endswith(FORMATS + COMPRESSED) and value.split() == [value]
    return is_file or os.path.exists(value)


def _may_be_source(value: Any) -> bool:
    """Return whether an item names a source if all others do so, too."""
    if not isinstance(value, str):
        return False
    return bool(_SOURCE.fullmatch(value) or (glob.has_magic(value) and glob.glob(value)))


def _of_columns(row: Any) -> Any:
    """Return a row of a table as plain values, without the null keys of structs in lists.

    All structs of a column have the keys of each of them.
    """

    def compact(value: Any, *, in_list: bool) -> Any:
        if isinstance(value, list):
            return [compact(each, in_list=True) for each in value]
        if not isinstance(value, dict):
            return value
        kept = ((key, each) for key, each in value.items() if not in_list or each is not None)
        return {key: compact(each, in_list=in_list) for key, each in kept}

    return compact(plain(row), in_list=False)


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
        has = ", ".join(map(str, splits))
        raise ValueError(
            f"{where} has the splits {has}; expected {name!r}, or one split. Set "
            "data.split or data.held_out_split."
        )
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
    for path in [source] if isinstance(source, str) else source:
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


def _numbered(rows: Iterable[Any], word: str = "row") -> Iterator[tuple[str, Any]]:
    return ((f"{word} {number}", row) for number, row in enumerate(rows, start=1))


def _parts_of_folder(
    folder: str, split: str | None, default: str, subset: str | None
) -> list[tuple[str, Iterator[tuple[str, Any]]]]:
    """Return (path, numbered rows) of each file."""
    with needed_by("a Hugging Face dataset folder", "datasets"):
        import datasets
    try:
        if any(Path(folder, name).is_file() for name in ("state.json", "dataset_dict.json")):
            saved: Any = datasets.load_from_disk(folder)
            splits = saved if isinstance(saved, Mapping) else {default: saved}
            if subset is not None:
                raise ValueError(f"data.subset is {subset!r}, and it has no subsets")
            return [(folder, _numbered(map(_of_columns, pick(splits, split, default, folder))))]
        files = datasets.load_dataset_builder(folder, name=subset).config.data_files
        return [(each, _rows_in(each)) for each in pick(files, split, default, folder)]
    except Exception as error:  # readers of datasets may raise any exception
        raise ValueError(f"{folder} cannot be read as a Hugging Face dataset: {error}") from error


def _rows_in(file: str) -> Iterator[tuple[str, Any]]:
    """Yield (number, row or error) of a file."""
    ends = [each.lower() for each in Path(file).suffixes[-2:]] or [".jsonl"]
    kind = ends[0] if ends[-1] in COMPRESSED else ends[-1]
    try:
        if kind not in FORMATS:
            raise ValueError(f"it ends in {kind}")
        yield from _rows_of_text(file, kind) if kind in TEXTS else _numbered(_table(file, kind))
    except BackendNotInstalledError:
        raise
    except Exception as error:  # readers may raise any exception
        reason = " ".join(str(error).split())
        expected = f"the format {kind}" if kind in FORMATS else f"one of {', '.join(FORMATS)}"
        raise ValueError(
            f"data cannot be read ({file}): {reason}, expected {expected}. Convert it, or pass its "
            "rows."
        ) from error


def _table(file: str, kind: str) -> Any:
    """Return the rows of a table.

    ``datasets`` would turn a text in JSON or CSV that looks like a number or a date into one: the
    answer "007" becomes 7. So JSON is decoded here, and the cells of CSV are read as texts.
    """
    with needed_by(f"a file of the format {kind}", "datasets"):
        import datasets
        import pandas  # datasets depends on it
    if kind in (".parquet", ".arrow"):
        where: Any = {"data_files": [glob.escape(file)], "split": "train"}
        return map(_of_columns, datasets.load_dataset(kind[1:], streaming=True, **where))
    cells: Any = {"dtype": str, "keep_default_na": False, "na_values": [""]}
    table = pandas.read_csv(file, sep="," if kind == ".csv" else "\t", **cells)
    if not isinstance(table.index, pandas.RangeIndex):
        raise ValueError("rows have more cells than the header")
    return table.to_dict("records")


def _rows_of_text(file: str, kind: str) -> Iterator[tuple[str, Any]]:
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
