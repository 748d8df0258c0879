"""Finished sessions in a file, which survives the script."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from helmsman.agents._session import SessionRecord


class _Entry(msgspec.Struct, omit_defaults=True):
    record: SessionRecord | None = None
    forgotten: list[str] = []


class Journal:
    """A file with one line per finished session, on the disk before ``add`` returns.

    A line that was cut off by a crash is dropped.

    Args:
        path: The file.

    Raises:
        OSError: It cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, SessionRecord] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        decoder = msgspec.json.Decoder(_Entry)
        kept = 0
        if path.exists():
            data = path.read_bytes()
            for line in data.splitlines(keepends=True):
                try:
                    entry = decoder.decode(line)
                except msgspec.DecodeError:
                    break
                if not line.endswith(b"\n"):
                    break
                kept += len(line)
                self._apply(entry)
        self._file = path.open("ab", buffering=0)
        os.ftruncate(self._file.fileno(), kept)

    def _apply(self, entry: _Entry) -> None:
        if entry.record is not None:
            self._records[entry.record.name] = entry.record
        for name in entry.forgotten:
            self._records.pop(name, None)

    def add(self, record: SessionRecord) -> None:
        """Keep a finished session."""
        self._append(_Entry(record=record))

    def forget(self, names: Sequence[str]) -> None:
        """Remove finished sessions; the file becomes empty with the last one."""
        known = [name for name in names if name in self._records]
        if known:
            self._append(_Entry(forgotten=known))
        with self._lock:
            if not self._records:
                os.ftruncate(self._file.fileno(), 0)

    def get(self, name: str) -> SessionRecord | None:
        """Return the finished session of a name; None if there is none."""
        return self._records.get(name)

    def _append(self, entry: _Entry) -> None:
        data = msgspec.json.encode(entry) + b"\n"
        with self._lock:
            self._file.write(data)
            os.fsync(self._file.fileno())
            self._apply(entry)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()
