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

    def save(self, step: int, write: Callable[[Path], object]) -> Path:
        """Let ``write`` fill a folder for ``step``, publish it and drop the oldest ones. Returns the folder.

        What an earlier attempt left, whose worker was killed while it wrote, is removed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.iterdir():
            if _UNFINISHED.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)
        unfinished = self.folder / f".step-{step:06d}"
        write(unfinished)
        path = self.folder / f"step-{step:06d}"
        self._remove(path)
        unfinished.rename(path)
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
