"""Tests of Checkpoints: atomic publication and retention."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from helmsman.controller._training.checkpoints import Checkpoints


def fill(folder: Path) -> None:
    folder.mkdir()
    (folder / "model").write_text(folder.name)


def test_checkpoints_keep_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", num_kept=2)
    assert checkpoints.latest() is None

    for step in (5, 10, 100):
        checkpoints.save(step, fill)

    assert checkpoints.latest() == (100, (tmp_path / "checkpoints" / "step-000100").resolve())
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "latest",
        "step-000010",
        "step-000100",
    ]


def test_checkpoints_ignore_an_unfinished_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, num_kept=2)
    checkpoints.save(1, fill)

    def fail(folder: Path) -> None:
        fill(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(2, fail)

    assert checkpoints.latest() == (1, (tmp_path / "step-000001").resolve())
    # an engine that is killed while it writes leaves this folder
    (tmp_path / "..step-000002.a1b2").mkdir()
    checkpoints.save(2, fill)
    assert checkpoints.latest() == (2, (tmp_path / "step-000002").resolve())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-000001",
        "step-000002",
    ]


def test_checkpoints_replace_one_of_the_same_step(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, num_kept=2)
    checkpoints.save(1, fill)
    checkpoints.save(1, lambda folder: folder.mkdir())

    assert checkpoints.latest() == (1, (tmp_path / "step-000001").resolve())
    assert not list((tmp_path / "step-000001").iterdir())


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_checkpoints_ignore_a_partly_removed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, num_kept=1)

    def fill_both(folder: Path) -> None:
        fill(folder)
        (folder / "optimizer").touch()

    for step in (1, 2):  # replaces a checkpoint, then removes the oldest
        checkpoints.save(1, fill_both)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rmdir", interrupt)  # runs after the removal of the files
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save(step, fill_both)
        for published in tmp_path.glob("step-*"):
            assert len(list(published.iterdir())) == 2

    checkpoints.save(3, fill_both)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000003"]


def test_checkpoints_folder_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers have another current folder."""
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints("checkpoints", num_kept=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    written: list[Path] = []

    def write(folder: Path) -> None:
        written.append(folder)
        fill(folder)

    checkpoints.save(1, write)
    assert written == [tmp_path / "checkpoints" / ".step-000001"]
    assert checkpoints.latest() == (1, (tmp_path / "checkpoints" / "step-000001").resolve())


def test_checkpoints_without_the_link(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, num_kept=2)
    checkpoints.save(1, fill)
    checkpoints.save(2, fill)
    (tmp_path / "latest").unlink()

    assert checkpoints.latest() == (2, (tmp_path / "step-000002").resolve())
    with pytest.raises(ValueError, match="num_kept is 0; expected 1 or more"):
        Checkpoints(tmp_path, num_kept=0)


def test_checkpoints_in_the_background(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, num_kept=2)
    begun: list[Path] = []
    assert checkpoints.finish() is None
    checkpoints.begin(
        5, begun.append, lambda folder: (folder / "added").write_text("by the script")
    )
    assert checkpoints.is_writing
    assert checkpoints.finish() is None
    assert checkpoints.latest() is None
    fill(begun[0])  # the write is complete
    assert checkpoints.finish() == tmp_path / "step-000005"
    assert not checkpoints.is_writing
    assert sorted(path.name for path in (tmp_path / "step-000005").iterdir()) == ["added", "model"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000005"]

    checkpoints.begin(10, begun.append, lambda folder: (folder / "added").touch())
    checkpoints.forget()
    fill(begun[1])
    assert checkpoints.finish() is None
    assert checkpoints.latest() == (5, (tmp_path / "step-000005").resolve())
    checkpoints.save(15, fill)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-000005",
        "step-000015",
    ]
