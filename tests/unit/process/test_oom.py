"""Tests of the count of processes that the kernel's OOM killer has ended."""

from __future__ import annotations

from pathlib import Path

from helmsman._process.oom import OomCount, oom_count, oom_kills_since


def test_oom_kills_since(tmp_path: Path) -> None:
    count = tmp_path / "memory.events"
    count.write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert oom_kills_since(OomCount(str(count), 1)) == 2
    assert oom_kills_since(OomCount(str(count), 3)) == 0
    assert oom_kills_since(OomCount(str(tmp_path / "removed"), 0)) == 0
    assert oom_kills_since(None) == 0
    assert oom_count() is not None or not Path("/proc/vmstat").exists()
