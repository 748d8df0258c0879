"""The folder of a run on a node, for all that Ray writes there: gone with the run or, where that was killed, with the next."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from helmsman.api.errors import PreflightError
from helmsman.controller._bootstrap.async_utils import Tell
from helmsman.controller._node.checks import RAY_SOCKET_BYTES, SOCKET_PATH_BYTES
from helmsman.controller._node.cleanup import leftovers, remove, remove_old_logs, up_folder, up_places
from helmsman.controller._node.run_registry import UP, RunLock, default_log_dir, make_log_dir, new_run_id
from helmsman.rpc_server._process.safe_files import private_directory, remove_tree

_LONGEST = SOCKET_PATH_BYTES - RAY_SOCKET_BYTES - len("/hm-0123456789")
"""Bytes of a path below which Ray's sockets still fit into the address of one."""


@contextlib.contextmanager
def run_folder(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """(id, folder) for this node's part of a run: of this user alone, with a record that it lives, and gone at the end.

    Raises: PreflightError where there is no place for it.
    """
    run_id = new_run_id()
    folder = up_folder(_parent(environ), run_id)
    with contextlib.ExitStack() as undo:
        try:
            for left in leftovers():
                if left.state == "dead" and left.record is not None and left.record.scheduler == UP:
                    remove(left)
            remove_old_logs()
            undo.callback(RunLock(run_id, UP, folder).release)
            with private_directory(folder.parent, folder.name):
                undo.callback(_remove, folder)
        except OSError as error:
            raise PreflightError(
                f"there is no place for Ray's files and the record of the run (in {folder.parent}): {error}. Name a folder "
                "that can be written to by TMPDIR, and by RAY_TMPDIR if that is set"
            ) from error
        yield run_id, folder


def _parent(environ: Mapping[str, str]) -> Path:
    """RAY_TMPDIR or the usual place for temporary files, if Ray's sockets fit there."""
    return next((place for place in up_places(environ) if len(os.fsencode(place)) <= _LONGEST), Path("/tmp"))


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):  # what stays is removed by the next run, or by helmsman clean
        remove_tree(folder)


def keep_logs(run_id: str, folder: Path, tell: Tell) -> None:
    """Keep what Ray has logged of a run that failed."""
    kept = default_log_dir(run_id)
    for path in [folder / "ray_start.log", *folder.glob("ray/session_2*/logs")]:
        if path.exists():
            try:
                make_log_dir(kept, run_id)
                shutil.move(path, kept / path.name)
            except OSError as error:  # such as a full disk; the exit code is of the run, and not of its logs
                tell(f"Ray's logs of this node cannot be kept in {kept}: {error}")
                return
    if kept.exists():
        tell(f"Ray's logs of this node are kept in {kept}")
