"""Test that other nodes read a bounded part of a worker's own recordings and log only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helmsman._process.recorder import FILE_BYTES, is_file_of, read_files
from helmsman.errors import UntrustedPathError


def test_read_files_of_one_worker(tmp_path: Path) -> None:
    for name in ("driver.log", "actor-10.log", "actor-10.7.events", "secret", "actor-1.log.old"):
        (tmp_path / name).write_bytes(b"x")
    for pid in (3, 4, 5):
        path = tmp_path / f"actor-1.{pid}.events"
        path.write_bytes(bytes(FILE_BYTES + 1))
        os.utime(path, (pid, pid))
    (tmp_path / "actor-1.log").write_bytes(b"early" + bytes(1 << 20))
    found = read_files(str(tmp_path), "actor/1")
    assert found.keys() == {"actor-1.log", "actor-1.4.events", "actor-1.5.events"}
    assert len(found["actor-1.log"]) == 1 << 20
    assert len(found["actor-1.5.events"]) == FILE_BYTES
    assert read_files(str(tmp_path), "actor/2") == {}


def test_read_files_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "actor-0.log").symlink_to(tmp_path / "secret")
    with pytest.raises(UntrustedPathError):
        read_files(str(tmp_path), "actor/0")


@pytest.mark.parametrize(
    "name", ["../actor-0.log", "actor-0.log/x", "actor-0.x.events", "actor-0.1.events\n", ""]
)
def test_is_file_of_other_names(name: str) -> None:
    assert not is_file_of("actor/0", name)
