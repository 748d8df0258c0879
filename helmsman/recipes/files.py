"""The output folder of a run: one run at a time writes to it, and files are replaced all or
nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def clear(out: Path, *, files: Sequence[str] = (), folders: Sequence[str] = ()) -> bool:
    """Remove what an earlier run left in the output folder, and nothing else; returns whether there
    was something.

    Args:
        files, folders: names of what it leaves besides those of this module.

    Raises: FileExistsError when the folder has things of these names, but was not an output folder.
    """
    mark = out / "settings.json"
    all_files = [out / name for name in ("metrics.jsonl", "summary.json", "curve.png", *files)]
    all_folders = [out / name for name in ("checkpoints", "logs", *folders)]
    found = [path.name for path in all_files + all_folders if path.exists()]
    if not mark.exists():
        if found:
            raise FileExistsError(
                f"{out} has {', '.join(found)} but no {mark.name}, so it is not the output of an "
                f"earlier run and is left as it "
                "is; give another --out"
            )
        return False
    for path in all_folders:
        shutil.rmtree(path, ignore_errors=True)
    for path in [
        *all_files,
        mark,
    ]:  # the mark last, so that a clearing that was cut short can be done again
        path.unlink(missing_ok=True)
    return True


@contextlib.contextmanager
def only_run_in(out: Path) -> Iterator[None]:
    """Keep every other run out of the output folder for the block, and no longer than this process
    lives.

    Raises: BlockingIOError when there is one.
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
    """Add a line of JSON by one write, so that a reader never sees half of it."""
    line = msgspec.json.encode(value) + b"\n"
    with open(path, "ab", buffering=0) as file:
        file.write(line)


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """All lines but one that a crash cut short; none where there is no file. Raises ValueError when
    they are something else.
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
    """Replace all lines, all or nothing."""
    write_atomically(path, b"".join(msgspec.json.encode(value) + b"\n" for value in values))


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, all or nothing."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content, all or nothing."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(data)
    temporary.replace(path)
