"""Flight recorder: the recent events of a process in a memory-mapped ring, which survives SIGKILL.

A file has a header, a table of names, and a ring of slots. A slot is written by one call of C code.
Its number is stored at both ends, so that a reader recognises a slot that was only half written
when the process was killed. A call or phase has one slot, to which its end is added.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import re
import struct
import threading
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple

from helmsman._process.pulse import CallRecord, shown_name
from helmsman._process.safe_files import open_log, open_regular
from helmsman._process.upkeep import is_file_at, touch
from helmsman.api.observer import Kind

SUFFIX = ".events"
NUM_SLOTS = 1 << 15
NUM_NAMES = 2048

_FORMAT = 4
_MAGIC = b"helmsman events %d\0" % _FORMAT
_ANY_MAGIC = re.compile(rb"helmsman events ([0-9]{1,9})\0")
_HEADER = struct.Struct("=18sIqq110s")
"""Magic, pid, monotonic and wall-clock nanoseconds at the start, title."""
_NAME = struct.Struct("=112s")
_SLOT = struct.Struct("=IBxHqddI4x")
"""Number, kind, name, number of the event, monotonic seconds, value, and the number again."""
_ALIVE_AT, _NAMES_AT = 240, 256
"""The last sign of life, in monotonic seconds, and the table of names."""
_SLOTS_AT = _NAMES_AT + NUM_NAMES * _NAME.size
_FIRST_VALUE = _SLOTS_AT // 8 + 3
FILE_BYTES = _SLOTS_AT + NUM_SLOTS * _SLOT.size
_MOST_RECORDINGS, _LOG_BYTES = 2, 1 << 20
"""Limits of the files of a worker that are read for a controller on another node."""
_MOST_S, _MOST_VALUE = 1e9, 1e15
"""Limits of times by a monotonic clock, in seconds, and of values of a slot that is intact."""
_LAST_CHANCE = NUM_SLOTS - 256
"""A slot counts as overwritten after this many further ones, since other threads write, too."""


_LASTING = (Kind.SENT, Kind.BEGUN, Kind.PHASE, Kind.OPEN)
"""Kinds whose slot gets an end by ``finish``."""
_BEGUN = int(Kind.BEGUN)


class Event(NamedTuple):
    """An event of one process."""

    at_ns: int
    """By the monotonic clock of its node."""
    kind: Kind
    name: str
    number: int
    value: float
    end_ns: int | None = None
    """When a call or phase ended; None if it has not, and for other kinds."""
    ok: bool = True
    """Whether a call had a result."""


class Recording(NamedTuple):
    """The content of a recorder's file."""

    title: str
    """Worker id, or 'script'."""
    pid: int
    clock_ahead_ns: int
    """Wall clock minus monotonic clock of its node."""
    alive_ns: int
    """Last sign of life by its monotonic clock; 0 without one."""
    events: list[Event]
    """Oldest first."""


class Recorder:
    """Records the events of this process: in memory first, in a file after ``persist_at``.

    The title is the worker's id, or 'script'.
    """

    def __init__(self, title: str) -> None:
        self._names: dict[str, int] = {}
        self._numbers, self._last = itertools.count(1), 0
        self._lock = threading.Lock()
        self._path, self._run_id = "", ""
        self._file: os.stat_result | None = None
        self._write_to(mmap.mmap(-1, FILE_BYTES))
        clocks = time.monotonic_ns(), time.time_ns()
        _HEADER.pack_into(self._page, 0, _MAGIC, os.getpid(), *clocks, title.encode()[:110])
        self.name("(other)")

    def _write_to(self, page: mmap.mmap) -> None:
        self._page = page
        # bound here, since every call of an engine is recorded
        self._pack = functools.partial(_SLOT.pack_into, page)
        self._floats = memoryview(page).cast("d")

    def persist_at(self, path: str, run_id: str) -> None:
        """Let ``renew`` write to ``<path>.<pid>.events``."""
        self._path, self._run_id = f"{path}.{os.getpid()}{SUFFIX}", run_id

    def renew(self) -> bool:
        """Write to the file from now on, with the events so far; again if it was removed.

        Returns:
            Whether it was removed.

        Raises:
            OSError: The file cannot be created, or the disk is full.
        """
        path = self._path
        if not path:
            return False
        if self._file is not None and is_file_at(path, self._file):
            touch(path)
            return False
        with os.fdopen(open_log(path, self._run_id, mapped=True), "r+b", buffering=0) as file:
            try:
                # Else a write to the mapped file raises SIGBUS once the disk is full.
                os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
            except OSError as error:
                os.ftruncate(file.fileno(), 0)  # blocks that were found must not stay taken
                raise OSError(error.errno, error.strerror, path) from error
            page, entry = mmap.mmap(file.fileno(), FILE_BYTES), os.fstat(file.fileno())
        with self._lock:
            if not self._path:  # it was closed meanwhile
                return False
            page[:] = self._page[:]
            self._write_to(page)
            before, self._file = self._file, entry
        return before is not None

    def beat(self) -> None:
        """Record that this process is alive now."""
        self._floats[_ALIVE_AT // 8] = time.monotonic()

    def close(self) -> None:
        """Close the file; later events are lost. Idempotent."""
        with self._lock:
            self._path = ""
            self._write_to(mmap.mmap(-1, FILE_BYTES))

    def name(self, text: str) -> int:
        """Return the number of a name; that of '(other)' if the table is full."""
        with self._lock:
            if text not in self._names and (number := len(self._names)) < NUM_NAMES:
                offset = _NAMES_AT + number * _NAME.size
                _NAME.pack_into(self._page, offset, text.encode(errors="replace"))
                self._names[text] = number
            return self._names.get(text, 0)

    def note(
        self, kind: int, name: int, number: int = 0, value: float = 0.0, at: float | None = None
    ) -> int:
        """Record an event as of ``at``, a ``time.monotonic()``, or of now.

        ``kind`` is a Kind, whose comment describes the others. Returns the slot, for ``finish``.
        """
        if at is None:
            at = time.monotonic()
        slot = self._last = next(self._numbers)
        check = slot & 0xFFFFFFFF
        offset = _SLOTS_AT + (slot & (NUM_SLOTS - 1)) * 40
        self._pack(offset, check, kind, name, number, at, value, check)
        return slot

    def finish(
        self, slot: int, end: float, kind: int, name: int, number: int, began: float
    ) -> None:
        """Record the end of a call or phase, by the result of ``note`` and its arguments.

        ``end`` is its ``time.monotonic()``, negative for an error. One whose slot has been
        overwritten is recorded again.
        """
        if self._last - slot < _LAST_CHANCE:
            self._floats[_FIRST_VALUE + (slot & (NUM_SLOTS - 1)) * 5] = end
        else:
            self.note(kind, name, number, end, began)


class CallLog:
    """Records calls, and shows the running one on a page for observers outside the process.

    ``is_serial`` tells whether a call ends before the next one begins.
    """

    def __init__(self, recorder: Recorder, shown: CallRecord, *, is_serial: bool) -> None:
        self._recorder, self._shown, self._is_serial = recorder, shown, is_serial
        self._named = functools.cache(lambda name: (recorder.name(name), shown_name(name)))
        """Returns the number of a call's name in the recorder, and its text on the page."""

    def begun(self, name: str, request_id: object, since: float) -> int:
        """Note a begin; returns the slot in the recorder, 0 if only the page shows the call."""
        number, text = self._named(name)
        self._shown.begun(text, since)
        if type(request_id) is int:
            return self._recorder.note(_BEGUN, number, request_id, 0.0, since)
        return 0

    def ended(self, slot: int, name: str, request_id: object, since: float) -> None:
        """Note the end of a call; the arguments are the result and those of ``begun``."""
        if self._is_serial:
            self._shown.ended()
        if type(request_id) is int:
            number, _ = self._named(name)
            self._recorder.finish(slot, time.monotonic(), _BEGUN, number, request_id, since)


def read_recording(path: str | os.PathLike[str]) -> Recording | None:
    """Read a recorder's file, also while it is written; None if it is not one.

    Raises:
        OSError: The file cannot be read.
    """
    with os.fdopen(open_regular(os.fspath(path)), "rb") as file:
        if why_not_read(file):
            return None
        file.seek(0)
        content = file.read(FILE_BYTES)
    _, pid, monotonic, wall, title = _HEADER.unpack_from(content)
    texts = [title, *(name for (name,) in _NAME.iter_unpack(content[_NAMES_AT:_SLOTS_AT]))]
    title, *names = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
    found = []
    for number, kind, name, event, at, value, again in _SLOT.iter_unpack(content[_SLOTS_AT:]):
        if not number or number != again or not 0 < kind <= len(Kind) or name >= NUM_NAMES:
            continue
        if not (0.0 <= at < _MOST_S and abs(value) < _MOST_VALUE):  # not a number, or damaged
            continue
        shown = Event(int(at * 1e9), Kind(kind), names[name], event, value)
        if kind in _LASTING:
            end_ns = int(abs(value) * 1e9) or None
            shown = shown._replace(value=0.0, end_ns=end_ns, ok=value >= 0)
        found.append(shown)
    found.sort(key=lambda each: each.at_ns)
    (alive,) = struct.unpack_from("=d", content, _ALIVE_AT)
    alive_ns = int(alive * 1e9) if 0.0 <= alive < _MOST_S else 0
    return Recording(title, pid, wall - monotonic, alive_ns, found)


def why_not_read(file: BinaryIO) -> str:
    """Return why an open file is not a recording of this version; '' if it is one."""
    content = file.read(_HEADER.size)
    num_bytes = file.seek(0, os.SEEK_END)
    if not content.startswith(_MAGIC):
        version = _ANY_MAGIC.match(content)
        found = f"of format {version[1].decode()}" if version else "of another format"
        return (
            f"a recording {found}, expected format {_FORMAT}. Use the version of Helmsman that "
            "has written it"
        )
    if num_bytes < FILE_BYTES:
        return f"a recording of {num_bytes} bytes, expected {FILE_BYTES}: it is cut off"
    _, _, monotonic, wall, _ = _HEADER.unpack(content)
    if not (0 <= monotonic < _MOST_S * 1e9 and 0 <= wall < _MOST_S * 4e9):
        return "a recording whose header has no possible time: it is damaged"
    return ""


def is_file_of(worker_id: str, name: str) -> bool:
    """Return whether a file's name is that of a recording or of the log of a worker."""
    stem = re.escape(worker_id.replace("/", "-"))
    return re.fullmatch(rf"{stem}(\.\d+{re.escape(SUFFIX)}|\.log)", name) is not None


def read_files(log_dir: str, worker_id: str) -> dict[str, bytes]:
    """Return the newest recordings of a worker of this node and the end of its log by file name.

    Raises:
        OSError: A file cannot be read.
    """
    paths = [each for each in Path(log_dir).iterdir() if is_file_of(worker_id, each.name)]
    newest = sorted(paths, key=lambda each: (each.suffix == SUFFIX, -each.lstat().st_mtime))
    found = {}
    for path in newest[: 1 + _MOST_RECORDINGS]:
        with os.fdopen(open_regular(path), "rb") as file:
            limit = FILE_BYTES if path.suffix == SUFFIX else _LOG_BYTES
            file.seek(max(file.seek(0, os.SEEK_END) - limit, 0))
            found[path.name] = file.read(limit)
    return found


assert _SLOT.size == 40
assert _SLOTS_AT % 8 == 0
