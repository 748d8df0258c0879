"""Tests that the guardian reads only valid records and marks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helmsman._process import guardian


def test_mark_of_unmarked_process() -> None:
    assert guardian.mark_of(os.getpid()) is None
    assert guardian.mark_of(2**22) is None


def test_read_record_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text('{"pid": 7, "exit_code": 0, "exit_signal": null}')
    (tmp_path / "worker.log.exit").symlink_to(tmp_path / "elsewhere")
    assert guardian.read_record(str(tmp_path / "worker.log"), 7) is None


@pytest.mark.parametrize(
    "content",
    ["[7]", "7", '{"pid": 7}', "[" * 100_000, '{"pid": 8, "exit_code": 0, "exit_signal": null}'],
)
def test_read_record_invalid_content(content: str, tmp_path: Path) -> None:
    Path(guardian.record_path(str(tmp_path / "a.log"))).write_text(content)
    assert guardian.read_record(str(tmp_path / "a.log"), 7) is None
