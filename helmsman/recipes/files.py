"""The output folder of a run: exclusive lock and atomic writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def clear(out: Path, *, files: Sequence[str] = (), folders: Sequence[str] = ()) -> bool:
    """Remove only the output of an earlier run from a folder.

    Args:
        out: The output folder.
        files: Names of a run's files, in addition to those of this module.
        folders: Names of a run's folders, in addition to those of this module.

    Returns:
        Whether there was an earlier run.

    Raises:
        FileExistsError: The folder has such names, but is not the output folder of a run.
    """
    mark = out / "settings.json"
    all_files = [out / name for name in ("metrics.jsonl", "summary.json", "curve.png", *files)]
    all_folders = [out / name for name in ("checkpoints", "logs", *folders)]
    found = [path.name for path in all_files + all_folders if path.exists()]
    if not mark.exists():
        if found:
            raise FileExistsError(
                f"{out} has {', '.join(found)} but no {mark.name}, so it is not the output of an "
                "earlier run and is not changed. Give another --out."
            )
        return False
    for path in all_folders:
        shutil.rmtree(path, ignore_errors=True)
    # settings.json comes last, so that an interrupted clear() can be repeated
    for path in [*all_files, mark]:
        path.unlink(missing_ok=True)
    return True


@contextlib.contextmanager
def only_run_in(out: Path) -> Iterator[None]:
    """Lock the output folder inside the block; the lock ends with the process at the latest.

    Raises:
        BlockingIOError: Another run has locked the folder.
    """
    with open(out / ".lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"another run writes to {out}; end it first, or give another --out"
            ) from error
        yield


def append_line(path: Path, value: Any) -> None:
    """Append a line of JSON by one write, so that readers never see half of it.

    Raises:
        OSError: It names the file. The disk may be full; no half of the line is left then.
    """
    line = msgspec.json.encode(value) + b"\n"
    with open(path, "ab", buffering=0) as file, _naming(path):
        end = file.seek(0, os.SEEK_END)
        if file.write(line) != len(line):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file to an error of a write, which has none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """Return all complete lines; a crash may have truncated the last one.

    The list is empty without a file.

    Raises:
        ValueError: A line is not of this type.
    """
    data = path.read_bytes() if path.exists() else b""
    try:
        return [
            msgspec.json.decode(line, type=kind)
            for line in data[: data.rfind(b"\n") + 1].splitlines()
        ]
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not the record of a run: {error}") from error


def write_lines(path: Path, values: Iterable[Any]) -> None:
    """Replace all lines atomically."""
    write_atomically(path, b"".join(msgspec.json.encode(value) + b"\n" for value in values))


def rewind(path: Path, step: int) -> None:
    """Remove the lines of all steps after this one, which will be repeated."""
    if path.exists():
        rows: list[dict[str, Any]] = read_lines(path, dict[str, Any])
        write_lines(path, [row for row in rows if row["step"] <= step])


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content by renaming a temporary file; create its folder if it is missing."""
    temporary = path.with_name(f".{path.name}")
    with _naming(path):
        path.parent.mkdir(exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
