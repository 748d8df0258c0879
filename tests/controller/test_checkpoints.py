"""Checkpoints appear whole, and the oldest go."""

from __future__ import annotations

from pathlib import Path

import pytest

from helmsman.controller.checkpoints import Checkpoints


def fill(folder: Path) -> None:
    folder.mkdir()
    (folder / "model").write_text(folder.name)


def test_the_newest_checkpoint_is_found_and_only_a_few_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", num_kept=2)
    assert checkpoints.latest() is None

    for step in (5, 10, 100):
        checkpoints.save(step, fill)

    assert checkpoints.latest() == (100, (tmp_path / "checkpoints" / "step-000100").resolve())
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-000010", "step-000100"]


def test_a_checkpoint_that_is_not_finished_is_not_seen_and_makes_way(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, num_kept=2)
    checkpoints.save(1, fill)

    def fail(folder: Path) -> None:
        fill(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(2, fail)

    assert checkpoints.latest() == (1, (tmp_path / "step-000001").resolve())
    (tmp_path / "..step-000002.a1b2").mkdir()  # as an engine leaves it that was killed while it wrote
    checkpoints.save(2, fill)
    assert checkpoints.latest() == (2, (tmp_path / "step-000002").resolve())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001", "step-000002"]


def test_a_checkpoint_is_replaced_by_one_of_the_same_step(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, num_kept=2)
    checkpoints.save(1, fill)
    checkpoints.save(1, lambda folder: folder.mkdir())

    assert checkpoints.latest() == (1, (tmp_path / "step-000001").resolve())
    assert not list((tmp_path / "step-000001").iterdir())


def test_a_lost_link_does_not_lose_the_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, num_kept=2)
    checkpoints.save(1, fill)
    checkpoints.save(2, fill)
    (tmp_path / "latest").unlink()

    assert checkpoints.latest() == (2, (tmp_path / "step-000002").resolve())


def test_none_would_stay(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_kept is 0; expected 1 or more"):
        Checkpoints(tmp_path, num_kept=0)
