"""Prints the workers' logs as they are written, for notebooks and consoles."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from helmsman._process.safe_files import open_regular

_EVERY_S = 0.2
_MOST_BYTES = 1 << 20
"""Largest part of one log that is read at once."""
_NOT_OF_WORKERS = ("driver.log", "forkserver.log")


class WorkerOutput:
    """Prints the workers' output from now on, each line with its worker: ``[rollout-0] ...``.

    It prints in a thread of its own until ``close``, to ``sys.stdout``; in a notebook that is the
    current cell. Workers on other nodes are included only if the folder is on a shared disk.

    Args:
        log_dir: The run's folder, ``scheduler.log_dir``.
        role: Print the workers of this role only; None for all.
    """

    def __init__(self, log_dir: str | Path, role: str | None = None) -> None:
        self._folder, self._pattern = Path(log_dir), f"{role or '*'}-*.log" if role else "*.log"
        self._ends = {path: path.lstat().st_size for path in self._logs()}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="helmsman-output", daemon=True)
        self._thread.start()

    def _logs(self) -> list[Path]:
        return sorted(
            path for path in self._folder.glob(self._pattern) if path.name not in _NOT_OF_WORKERS
        )

    def _run(self) -> None:
        while not self._closing.wait(_EVERY_S):
            self._print_new()
        self._print_new()

    def _print_new(self) -> None:
        for path in self._logs():
            try:
                with os.fdopen(open_regular(path), "rb") as file:
                    file.seek(self._ends.get(path, 0))
                    data = file.read(_MOST_BYTES)
            except OSError:
                continue  # removed, another user's, or no file
            complete = data.rfind(b"\n") + 1 if len(data) < _MOST_BYTES else len(data)
            self._ends[path] = self._ends.get(path, 0) + complete
            lines = data[:complete].decode(errors="replace").splitlines()
            if lines:
                print(*(f"[{path.stem}] {line}" for line in lines), sep=os.linesep, flush=True)

    def close(self) -> None:
        """Print the remaining output, and stop. Idempotent."""
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
