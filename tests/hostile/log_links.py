"""A link in the place of a worker's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from helmsman import Job
from helmsman.api.errors import WorkerStartError
from helmsman.controller._scheduler.backend_scheduler import BackendScheduler


def assert_refuses_log_file_link(scheduler: BackendScheduler, precious: Path) -> None:
    """Check that a worker starts only when no link is in the place of its log."""
    log = scheduler.log_dir / "a-0.log"
    log.parent.mkdir(exist_ok=True)
    log.symlink_to(precious / "thesis.txt")
    with pytest.raises(WorkerStartError) as caught:
        scheduler.create_workers(Job(role="a"))
    assert f"{log} is not used: it is a symbolic link" in str(caught.value)
    assert "expected a regular file" in str(caught.value)
    log.unlink()
    scheduler.create_workers(Job(role="a"))
    assert log.stat().st_mode & 0o777 == 0o600
