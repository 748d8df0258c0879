"""The recordings and the log of a worker on this node, for a controller on another one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from helmsman.rpc_server._process.recorder import FILE_BYTES, SUFFIX
from helmsman.rpc_server._process.safe_files import open_regular

_MOST_RECORDINGS = 2
_LOG_BYTES = 1 << 20


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
    newest = sorted(paths, key=lambda each: (each.suffix == SUFFIX, -each.stat().st_mtime))
    found = {}
    for path in newest[: 1 + _MOST_RECORDINGS]:
        with os.fdopen(open_regular(path), "rb") as file:
            limit = FILE_BYTES if path.suffix == SUFFIX else _LOG_BYTES
            file.seek(max(file.seek(0, os.SEEK_END) - limit, 0))
            found[path.name] = file.read(limit)
    return found
