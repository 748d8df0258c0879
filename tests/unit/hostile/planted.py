"""Files that another user plants, and a directory of the victim that they refer to."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helmsman.controller._scheduler.run_registry import UP, RunRecord, user_dir

ATTACKER = 65_534
RUN_ID = "0123456789"
NEEDS_ROOT = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user"),
]


def as_another_user(test: Any) -> Any:
    """Mark a test that acts as another user."""
    return NEEDS_ROOT[0](NEEDS_ROOT[1](test))


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files with the mode of /tmp. ``tmp_path`` lies elsewhere."""
    with tempfile.TemporaryDirectory(prefix="hh-") as path:  # short, for the sockets of Ray
        os.chmod(path, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", path)
        for name in ("TMPDIR", "RAY_TMPDIR"):
            monkeypatch.setenv(name, path)
        yield Path(path)


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A directory of the victim with a file, which the test must not change."""
    path = tmp_path / "precious"
    path.mkdir()
    (path / "thesis.txt").write_text("years of work")
    yield path
    assert os.listdir(path) == ["thesis.txt"]
    assert (path / "thesis.txt").read_text() == "years of work"


def plant_record(log_dir: Path, *, name: str = RUN_ID, **changes: Any) -> Path:
    """Write a record of a dead run of ``helmsman up``, which names ``log_dir`` as its folder."""
    facts = {
        "run_id": RUN_ID,
        "pid": 1,
        "host": "h",
        "command": "c",
        "scheduler": UP,
        "log_dir": str(log_dir),
        "since": 1.0,
    }
    path = user_dir() / "runs" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_bytes(msgspec.json.encode(RunRecord(**{**facts, **changes})))
    return path


def give_to_attacker(path: Path) -> None:
    """Give a tree to the attacker."""
    for each in (path, *path.rglob("*")):
        os.chown(each, ATTACKER, ATTACKER, follow_symlinks=False)
