"""A folder of numbered checkpoints, of which each is there as a whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

_PUBLISHED = re.compile(r"step-(\d{6,})")
_UNFINISHED = re.compile(r"\.+step-\d{6,}.*")
"""Ours, and what an engine writes beside it before it takes that name."""


class Checkpoints:
    """The newest few checkpoints of a run: ``step-000120/``, ... and ``latest``, a link to the newest. One run writes to it.

    Args:
        folder: where they are; it is made with the first one.
        num_kept: how many stay.
    """

    def __init__(self, folder: str | os.PathLike[str], num_kept: int) -> None:
        if num_kept < 1:
            raise ValueError(f"num_kept is {num_kept}; expected 1 or more")
        self.folder = Path(folder).absolute()  # it goes to workers, whose current folder may be another
        self.num_kept = num_kept
        self._begun: int | None = None
        """The step of a checkpoint that is being written in the background."""

    def save(self, step: int, write: Callable[[Path], object]) -> Path:
        """Let ``write`` fill a folder for ``step``, publish it and drop the oldest ones. Returns the folder.

        What an earlier attempt left, whose worker was killed while it wrote, is removed.
        """
        self._make_ready()
        write(self._unfinished(step))
        return self._publish(step)

    def begin(self, step: int, begin: Callable[[Path], object], add_files: Callable[[Path], object] | None = None) -> None:
        """Let ``begin`` have somebody fill a folder for ``step`` in the background, who gives it its name when it is complete;
        ``finish`` publishes it.

        Args:
            add_files: fills a folder whose contents are added to the checkpoint then: what it writes is of now.
        """
        self._make_ready()
        if add_files is not None:
            added = self._added(step)
            added.mkdir()
            add_files(added)
        begin(self._unfinished(step))
        self._begun = step

    def finish(self) -> Path | None:
        """Publish what ``begin`` began, if it is complete by now; returns its folder then, and None when it is not, or there is
        nothing to be published."""
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
        """Count nothing that ``begin`` began: those who wrote it have gone."""
        self._begun = None

    @property
    def is_writing(self) -> bool:
        """Whether ``finish`` has something to publish, now or later."""
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
        """Step and folder of the newest checkpoint; ``latest`` is for people, as a copied folder may have lost the link."""
        steps = self._steps()
        return (steps[-1], (self.folder / f"step-{steps[-1]:06d}").resolve()) if steps else None

    def _remove(self, path: Path) -> None:
        """Under another name: a script that is killed meanwhile leaves no half of a checkpoint under this one."""
        if path.exists():
            shutil.rmtree(path.rename(self.folder / f".{path.name}.old"))

    def _steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        matches = (_PUBLISHED.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)
