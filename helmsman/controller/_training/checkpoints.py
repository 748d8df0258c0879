"""Folders of checkpoints, of which the newest are kept."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

_PUBLISHED = re.compile(r"step-(\d{6,})")
_UNFINISHED = re.compile(r"\.+step-\d{6,}.*")
"""Our unfinished folders, and those that an engine writes beside them before it renames them."""


class Checkpoints:
    """The newest checkpoints of a run, in ``step-000120/``, ... with a link ``latest``.

    A folder belongs to one run at a time.

    Args:
        folder: Parent folder; created with the first checkpoint.
        num_kept: Number of checkpoints to keep, newest first.

    Raises:
        ValueError: ``num_kept`` is below 1.
    """

    def __init__(self, folder: str | os.PathLike[str], num_kept: int) -> None:
        if num_kept < 1:
            raise ValueError(f"num_kept is {num_kept}; expected 1 or more")
        # Absolute, since workers may have another current folder.
        self.folder = Path(folder).absolute()
        self.num_kept = num_kept
        self._begun: int | None = None
        """The step of a checkpoint that is being written in the background."""

    def save(self, step: int, write: Callable[[Path], object]) -> Path:
        """Write and publish the checkpoint of a step, and delete the oldest ones.

        Unfinished folders of earlier attempts are removed first.

        Args:
            step: Number of the step.
            write: Creates the given folder and writes the checkpoint into it.

        Returns:
            The published folder.
        """
        self._make_ready()
        write(self._unfinished(step))
        return self._publish(step)

    def begin(
        self,
        step: int,
        begin: Callable[[Path], object],
        add_files: Callable[[Path], object] | None = None,
    ) -> None:
        """Start to write the checkpoint of a step in the background; ``finish`` publishes it.

        Unfinished folders of earlier attempts are removed first.

        Args:
            step: Number of the step.
            begin: Starts the write. The given folder must appear only when it is complete.
            add_files: Writes further files into a temporary folder, at once, so that they match
                ``step``. ``finish`` moves them into the checkpoint.
        """
        self._make_ready()
        if add_files is not None:
            added = self._added(step)
            added.mkdir()
            add_files(added)
        begin(self._unfinished(step))
        self._begun = step

    def finish(self) -> Path | None:
        """Publish the background checkpoint if it is complete, and return its folder.

        Returns None if there is none, or if it is still being written.
        """
        if self._begun is None or not self._unfinished(self._begun).is_dir():
            return None
        step, self._begun = self._begun, None
        added = self._added(step)
        if added.is_dir():
            for path in added.iterdir():
                path.rename(self._unfinished(step) / path.name)
            added.rmdir()
        return self._publish(step)

    def forget(self) -> None:
        """Drop the background checkpoint, when the processes that wrote it have exited."""
        self._begun = None

    @property
    def is_writing(self) -> bool:
        """Whether a background checkpoint has not been published yet."""
        return self._begun is not None

    def _unfinished(self, step: int) -> Path:
        return self.folder / f".step-{step:06d}"

    def _added(self, step: int) -> Path:
        return self.folder / f".step-{step:06d}.added"

    def _make_ready(self) -> None:
        self._begun = None
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.iterdir():
            if _UNFINISHED.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)

    def _publish(self, step: int) -> Path:
        path = self.folder / f"step-{step:06d}"
        self._remove(path)
        self._unfinished(step).rename(path)
        link = self.folder / ".latest"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        link.replace(self.folder / "latest")
        for old in self._steps()[: -self.num_kept]:
            self._remove(self.folder / f"step-{old:06d}")
        return path

    def latest(self) -> tuple[int, Path] | None:
        """Return the step and the folder of the newest checkpoint; None if there is none.

        The link ``latest`` is not used: a copy of the folder may lack it.
        """
        steps = self._steps()
        return (steps[-1], (self.folder / f"step-{steps[-1]:06d}").resolve()) if steps else None

    def _remove(self, path: Path) -> None:
        # Renamed first: a script killed here leaves no partial checkpoint under this name.
        # Files that a network file system keeps are left to the next checkpoint's _make_ready.
        if path.exists():
            shutil.rmtree(path.rename(self.folder / f".{path.name}.old"), ignore_errors=True)

    def _steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        matches = (_PUBLISHED.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)
