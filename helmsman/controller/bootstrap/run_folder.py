"""The folder of a run on a node, for all that Ray writes there: gone with the run or, where that was killed, with the next."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from helmsman.controller.bootstrap.waits import Tell
from helmsman.controller.clean import leftovers, remove
from helmsman.controller.node_checks import RAY_SOCKET_BYTES, SOCKET_PATH_BYTES
from helmsman.controller.runs import UP, RunLock, default_log_dir

_LONGEST = SOCKET_PATH_BYTES - RAY_SOCKET_BYTES - len("/hm-0123456789ab")
"""Bytes of a path below which Ray's sockets still fit into the address of one."""


@contextlib.contextmanager
def run_folder(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """(id, folder) for this node's part of a run: of this user alone, with a record that it lives, and gone at the end."""
    for left in leftovers():
        if left.state == "dead" and left.record is not None and left.record.scheduler == UP:
            remove(left)
    run_id = secrets.token_hex(6)
    folder = _parent(environ) / f"hm-{run_id}"
    lock = RunLock(run_id, UP, folder)
    folder.mkdir(mode=0o700)
    try:
        yield run_id, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _parent(environ: Mapping[str, str]) -> Path:
    """RAY_TMPDIR or the usual place for temporary files, if Ray's sockets fit there."""
    places = [environ.get("RAY_TMPDIR", ""), tempfile.gettempdir()]
    return Path(next((place for place in places if place and len(os.fsencode(place)) <= _LONGEST), "/tmp"))


def keep_logs(run_id: str, folder: Path, tell: Tell) -> None:
    """Keep what Ray has logged of a run that failed."""
    kept = default_log_dir(run_id)
    for path in [folder / "ray_start.log", *folder.glob("ray/session_2*/logs")]:
        if path.exists():
            kept.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.move(path, kept / path.name)
    if kept.exists():
        tell(f"Ray's logs of this node are kept in {kept}")
