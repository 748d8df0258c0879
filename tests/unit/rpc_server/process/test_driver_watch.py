"""Tests of the removal of a run's folder by the watcher of its forkserver."""

from __future__ import annotations

from pathlib import Path

import pytest

from helmsman.rpc_server._process.driver_watch import _remove


def test_remove_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").touch()
    (tmp_path / "run").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="Not a directory"):
        _remove(str(tmp_path / "run"))
    assert (tmp_path / "precious" / "thesis.txt").exists()
