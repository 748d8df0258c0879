"""Reads rows from JSONL files, Hugging Face dataset folders and Python objects."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from helmsman.api.extras import needed_by


def rows_of(data: Iterable[Any]) -> list[Any]:
    """Return the rows of a finite iterable.

    Raises:
        ValueError: There are no rows.
    """
    rows = list(data)
    if not rows:
        raise ValueError("data has no rows; expected at least one")
    return rows


def source_name(rows: list[Any]) -> str:
    """Return a name from the content of rows, which a resumed run compares."""
    digest = hashlib.sha256(msgspec.json.encode(rows, enc_hook=repr)).hexdigest()
    return f"rows-{len(rows)}-{digest[:12]}"


def read_rows(
    source: str, rows: list[Any] | None, prompt_key: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, entry) of each row.

    Args:
        source: A JSONL file or a Hugging Face dataset folder.
        rows: Rows to read instead of ``source``: mappings, texts, chats or token ids.
        prompt_key: Key under which rows that are not mappings are stored.

    Raises:
        ValueError: A row is invalid; the message names its place.
        OSError: The file cannot be read.
        BackendNotInstalledError: A dataset folder needs the package ``datasets``.
    """
    if rows is not None:
        for number, row in enumerate(rows, start=1):
            entry = dict(row) if isinstance(row, Mapping) else {prompt_key: row}
            yield f"row {number} of the data", entry
    elif Path(source).is_dir():
        for number, row in enumerate(_dataset_rows(source), start=1):
            yield f"{source}, row {number}", dict(row)
    else:
        lines = Path(source).read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{source}, line {number}", _decode(line, f"{source}, line {number}")


def _decode(line: bytes, place: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{place}: {error}; expected a JSON object") from error


def _dataset_rows(folder: str) -> Iterable[Mapping[str, Any]]:
    with needed_by("a Hugging Face dataset folder", "datasets"):
        import datasets
    try:
        # Folders written by save_to_disk have their own layout; others hold data files, such as
        # parquet.
        found: Any = (
            datasets.load_from_disk(folder)
            if _is_saved(Path(folder))
            else datasets.load_dataset(folder)
        )
    except Exception as error:  # readers of datasets may raise any exception
        raise ValueError(f"{folder} cannot be read as a Hugging Face dataset: {error}") from error
    if isinstance(found, Mapping):
        if "train" not in found and len(found) != 1:
            raise ValueError(
                f"{folder} has the splits {', '.join(found)}; expected 'train', or one split"
            )
        found = found["train"] if "train" in found else next(iter(found.values()))
    rows: Iterable[Mapping[str, Any]] = found
    return rows


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
