"""Test that threads of torch's CPU operators spin briefly in a worker, as libgomp reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from helmsman import Job, RayScheduler, Scheduler
from helmsman.controller._scheduler.local import LocalScheduler


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_threads_spin_briefly(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_DISPLAY_ENV", "verbose")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    scheduler: Scheduler
    if kind == "local":
        scheduler = LocalScheduler(log_dir=tmp_path, preload=["torch"])
    else:
        scheduler = RayScheduler(address="local", num_cpus=1, log_dir=tmp_path, preload=["torch"])
    with scheduler:
        scheduler.create_workers(Job(role="a"))
        logs = "".join(path.read_text() for path in tmp_path.rglob("*.log"))
    assert "GOMP_SPINCOUNT = '1000'" in logs
    assert "GOMP_SPINCOUNT = '300000'" not in logs
