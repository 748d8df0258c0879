"""Finished sessions in an SQLite file, which survives the script."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from helmsman.agents._session import SessionRecord


class Journal:
    """A file with one row per finished session, on the disk before ``add`` returns.

    Raises:
        OSError: It cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Locks of files do not work on all network file systems.
        url = f"file:{urllib.parse.quote(str(path))}?nolock=1"
        self._path = path
        self._file = sqlite3.connect(url, uri=True, check_same_thread=False)
        with self._translated():
            self._file.execute("PRAGMA journal_mode = PERSIST")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS sessions (name TEXT PRIMARY KEY, record BLOB)"
            )

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            with self._lock, self._file:  # commits, or rolls back
                yield
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise OSError(f"the journal {self._path} cannot be used: {error}") from error

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[SessionRecord]:
        with self._translated():
            rows = self._file.execute(query, values).fetchall()
            return [_unpacked(record) for (record,) in rows]

    def add(self, record: SessionRecord) -> None:
        """Keep a finished session."""
        self._rows(
            "INSERT OR REPLACE INTO sessions VALUES (?, ?)",
            (record.name, _packed(record)),
        )

    def forget(self, names: Sequence[str]) -> None:
        """Remove finished sessions."""
        with self._translated():
            self._file.executemany(
                "DELETE FROM sessions WHERE name = ?", [(each,) for each in names]
            )

    def get(self, name: str) -> SessionRecord | None:
        """Return the finished session of a name; None if there is none."""
        found = self._rows("SELECT record FROM sessions WHERE name = ?", (name,))
        return found[0] if found else None

    def all(self) -> list[SessionRecord]:
        """Return all finished sessions, in the order of their ends."""
        return self._rows("SELECT record FROM sessions ORDER BY rowid")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


_AS_JSON = "helmsman:json"
"""The only key of metadata that are kept as JSON."""


def _packed(record: SessionRecord) -> bytes:
    # A lone surrogate, or an integer of more than 64 bits, does not fit into msgpack.
    with contextlib.suppress(UnicodeEncodeError, OverflowError):
        if set(record.metadata) != {_AS_JSON}:
            return msgspec.msgpack.encode(record)
    metadata = {_AS_JSON: json.dumps(record.metadata)}
    return msgspec.msgpack.encode(msgspec.structs.replace(record, metadata=metadata))


def _unpacked(data: bytes) -> SessionRecord:
    record = msgspec.msgpack.decode(data, type=SessionRecord)
    if set(record.metadata) != {_AS_JSON}:
        return record
    return msgspec.structs.replace(record, metadata=json.loads(record.metadata[_AS_JSON]))
