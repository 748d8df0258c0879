"""A real run's log directory and ways to damage it, and the property of commands that read it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import os
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import strategies as st

from helmsman import Job, LocalScheduler
from helmsman._cli import main
from helmsman._process.recorder import FILE_BYTES
from helmsman.api import errors
from helmsman.controller._scheduler.run_registry import record_here
from tests.contract.engines import Counter

RUN_ID = "0123456789"
COMMANDS = ("postmortem", "trace", "logs", "report", "status", "runs")
Damage = Callable[[Path], None]


def record_run(folder: Path) -> None:
    """Write the logs and recordings of a run with two workers, one of which dies."""
    with LocalScheduler(log_dir=folder, preload=()) as scheduler:
        workers = scheduler.create_workers(Job(role="a", replicas=2))
        for worker in workers:
            asyncio.run(scheduler.create_engine(worker, Counter))
        with scheduler.reporter.phase("step", "1"):
            for _ in range(20):
                scheduler.call_engine("a/0", "add")
        with contextlib.suppress(errors.HelmsmanError):
            scheduler.call_engine("a/1", "no such method")
        asyncio.run(scheduler.kill_worker("a/1", "was ended by a test"))


@contextlib.contextmanager
def own_places(folder: Path) -> Iterator[Path]:
    """Let records of runs lie in a folder of the test; yields it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.delenv("XDG_STATE_HOME", raising=False)
        places = folder / "helmsman" / "runs"
        places.mkdir(mode=0o700, parents=True)
        (folder / "helmsman").chmod(0o700)
        yield places


def _overwrite(path: Path, at: float, content: bytes) -> None:
    with (
        contextlib.suppress(OSError),
        open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file,
    ):
        file.seek(int(at * os.fstat(file.fileno()).st_size))
        file.write(content)


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    make(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.suppress(OSError):  # a long path
        made.bind(str(path))


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 5 << 30)


_KINDS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "dangling": lambda path: path.symlink_to("/nowhere"),
    "socket": _socket,
    "empty": Path.touch,
    "sparse": _sparse,
    "newlines": lambda path: path.write_bytes(b"\n" * (1 << 20)),
    "no newline": lambda path: path.write_bytes(b"x/" * (1 << 18)),
    "nothing": lambda path: None,
}
_NAMES = ("driver.log", "a-0.log", "a-1.log", "forkserver.log", "fetched", "fetched/a-0.log")
_SUFFIXES = st.sampled_from([".log", "-0.log", "-\u0663.log", ".events", ".1.events", "", ".txt"])
_PARTS = st.binary(min_size=1, max_size=20).map(
    lambda e: e.translate(bytes.maketrans(b"/\0", b"__"))
)
_NEW_NAMES = st.builds(lambda a, b: os.fsdecode(a) + b, _PARTS, _SUFFIXES).filter(
    lambda name: name not in (".", "..")
)
_YEARS = st.sampled_from(
    ["0000", "0001", "1969", "1970", "2026", "2038", "9999", "\u0662\u0660\u0662\u0666"]
)
_DATES = st.builds(
    "{}-{:02}-{:02}{}{:02}:{:02}:{:02}{} {}".format,
    _YEARS,
    *(st.integers(0, top) for top in (13, 32)),
    st.sampled_from(" T"),
    *(st.integers(0, top) for top in (25, 61, 61)),
    st.sampled_from(["", ",5", ".123456789012", "+25:00", "Z"]),
    st.sampled_from(
        [
            "x",
            "INFO run 0123456789 begins: ",
            "INFO run ( begins: x",
            "Traceback",
            "**/1 (pid 9, n)",
        ]
    ),
)
_TEXTS = st.one_of(_DATES.map(str.encode), st.binary(max_size=200), st.just(b"\0" * 4096))
_FLOATS = st.floats(allow_nan=True, allow_infinity=True).map(lambda e: struct.pack("=d", e))
_WHOLE = st.integers(-(2**63), 2**63 - 1).map(lambda e: struct.pack("=q", e))


def _events(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.events"))


def _insert(name: str, line: bytes, at: float) -> Damage:
    def do(folder: Path) -> None:
        path = folder / name
        if not os.path.lexists(path):
            path.write_bytes(line)
        elif stat.S_ISREG(path.lstat().st_mode) and path.lstat().st_size < 1 << 22:
            lines = path.read_bytes().split(b"\n")
            lines.insert(int(at * len(lines)), line)
            path.write_bytes(b"\n".join(lines))

    return do


def _of_recordings(which: float, at: float, content: bytes) -> Damage:
    def do(folder: Path) -> None:
        paths = _events(folder)
        if paths:
            path = paths[int(which * len(paths))]
            size = FILE_BYTES if at > 0.3 else 20_000  # the header and the first slots, too
            offset = int(at * size) // 8 * 8
            if path.is_file():
                _overwrite(path, offset / FILE_BYTES, content)

    return do


def _other_version(which: float, magic: bytes, num_bytes: int) -> Damage:
    def do(folder: Path) -> None:
        paths = _events(folder)
        if paths and (path := paths[int(which * len(paths))]).is_file():
            _overwrite(path, 0.0, magic)
            os.truncate(path, min(num_bytes, 2 * FILE_BYTES))

    return do


_PLACES = st.floats(0.0, 0.999)
_ANY_NAME = st.one_of(st.sampled_from(_NAMES), _NEW_NAMES)
DAMAGES: st.SearchStrategy[Damage] = st.one_of(
    st.builds(_insert, _ANY_NAME, _TEXTS, _PLACES),
    st.builds(
        lambda name, kind: lambda folder: _replace(folder / name, _KINDS[kind]),
        _ANY_NAME,
        st.sampled_from(sorted(_KINDS)),
    ),
    st.builds(
        lambda name, at, content: lambda folder: _overwrite(folder / name, at, content),
        st.sampled_from(_NAMES),
        _PLACES,
        st.binary(max_size=64),
    ),
    st.builds(_of_recordings, _PLACES, _PLACES, st.one_of(_FLOATS, _WHOLE, st.binary(max_size=80))),
    st.builds(
        _other_version,
        _PLACES,
        st.sampled_from([b"helmsman events 3\0", b"helmsman events 5\0", b"\0" * 18, b""]),
        st.integers(0, 2 * FILE_BYTES),
    ),
)


def _record_bytes(folder: Path) -> st.SearchStrategy[bytes]:
    """Return records of runs: of this version, of others, and texts that are none."""
    plain = msgspec.structs.asdict(record_here(RUN_ID, "LocalScheduler", folder))
    odd = st.one_of(
        st.none(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(max_size=30),
        st.lists(st.none()),
    )
    changed = st.dictionaries(st.sampled_from([*plain, "a_later_field"]), odd, max_size=3)
    return st.one_of(
        changed.map(lambda more: msgspec.json.encode(plain | more)),
        st.just(msgspec.json.encode(plain)),
        st.sampled_from([b"[" * 60_000, b"", b"null", b"{}"]),
        st.binary(max_size=100),
    )


RECORDS = _record_bytes(Path("/nowhere"))


def run_command(folder: Path, places: Path, command: str, record: bytes, locked: bool) -> int:
    """Run a command on a log directory, with a record of a run beside it; returns its code."""
    path = places / f"{RUN_ID}.json"
    path.write_bytes(record)
    out = str(folder.parent / "out")
    arguments = {
        "trace": [str(folder), "-o", out],
        "report": [str(folder), "-o", out],
        "status": [RUN_ID],
        "runs": [],
    }
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with path.open("rb") as file, contextlib.ExitStack() as stack:
        if locked:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        stack.enter_context(contextlib.redirect_stdout(shown))
        stack.enter_context(contextlib.redirect_stderr(shown))
        code = main([command, *arguments.get(command, [str(folder)])])
        shown.flush()
    return code


ARGUMENTS = {
    "damages": st.lists(DAMAGES, min_size=1, max_size=5),
    "command": st.sampled_from(COMMANDS),
    "record": RECORDS,
    "locked": st.booleans(),
}


def check_command(
    recorded: Path, places: Path, damages: list[Damage], command: str, record: bytes, locked: bool
) -> None:
    """Damage a copy of a log directory, and check that a command ends with a documented code."""
    folder = recorded.parent / "damaged"
    shutil.copytree(recorded, folder)
    try:
        for damage in damages:
            with contextlib.suppress(OSError):  # an earlier one has replaced its folder
                damage(folder)
        assert run_command(folder, places, command, record, locked) in (0, 1, 2)
    finally:
        shutil.rmtree(folder)
