"""Test that a planted link makes no Ray worker write its log there."""

from __future__ import annotations

from pathlib import Path

from helmsman import RayScheduler
from tests.hostile.log_links import assert_refuses_log_file_link
from tests.unit.hostile.planted import precious, shared

__all__ = ["precious", "shared"]


def test_scheduler_refuses_log_file_link(shared: Path, precious: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with RayScheduler(address="local", num_cpus=2, preload=None, log_dir=logs) as scheduler:
        assert_refuses_log_file_link(scheduler, precious)
