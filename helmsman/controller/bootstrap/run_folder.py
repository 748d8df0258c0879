"""The folder of a run on a node, for all that Ray writes there: gone with the run or, where that was killed, with the next."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from helmsman.controller.bootstrap.waits import Tell
from helmsman.controller.runs import default_log_dir

_PREFIX = "hm-"
_LOCK = "owner"
_LONGEST = 38
"""Bytes of a path below which Ray's sockets still fit into the address of one."""


@contextlib.contextmanager
def run_folder(environ: Mapping[str, str]) -> Iterator[Path]:
    """A folder of this user alone, which is removed at the end."""
    parent = _parent(environ)
    remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    with (folder / _LOCK).open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user's runs whose supervisors were killed: nobody holds their locks."""
    for path in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), path.open() as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(owner.fileno()).st_uid == os.geteuid():
                shutil.rmtree(path.parent, ignore_errors=True)


def _parent(environ: Mapping[str, str]) -> Path:
    """RAY_TMPDIR or the usual place for temporary files, if Ray's sockets fit there."""
    places = [environ.get("RAY_TMPDIR", ""), tempfile.gettempdir()]
    return Path(next((place for place in places if place and len(os.fsencode(place)) <= _LONGEST), "/tmp"))


def keep_logs(folder: Path, tell: Tell) -> None:
    """Keep what Ray has logged of a run that failed."""
    kept = default_log_dir(f"up-{secrets.token_hex(4)}")
    for path in [folder / "ray_start.log", *folder.glob("ray/session_2*/logs")]:
        if path.exists():
            kept.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.move(path, kept / path.name)
    if kept.exists():
        tell(f"Ray's logs of this node are kept in {kept}")
