"""Tests that planted directories and links make no worker write logs there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helmsman import Job, LocalScheduler
from helmsman.api.errors import HelmsmanError
from helmsman.controller._scheduler.run_registry import default_log_dir, user_dir
from tests.hostile.log_links import assert_refuses_log_file_link
from tests.unit.hostile.planted import (
    ATTACKER,
    NEEDS_ROOT,
    RUN_ID,
    as_another_user,
    give_to_attacker,
    plant_record,
    precious,
    shared,
)

__all__ = ["precious", "shared"]


class TestForeignUserDirectory:
    """Another user owns the directory in /tmp that has our name."""

    pytestmark = NEEDS_ROOT

    @pytest.fixture(autouse=True)
    def planted(self, shared: Path, precious: Path) -> Path:
        plant_record(precious)
        (user_dir() / RUN_ID).symlink_to(precious)
        give_to_attacker(user_dir())
        return user_dir()

    def test_scheduler_writes_no_logs_there(self, planted: Path) -> None:
        before = sorted(os.listdir(planted))
        with LocalScheduler(preload=()) as scheduler, pytest.raises(HelmsmanError) as caught:
            scheduler.create_workers(Job(role="a"))
        assert f"{planted} is not used: it is a directory" in str(caught.value)
        assert sorted(os.listdir(planted)) == before

    def test_scheduler_without_record_warns(
        self, planted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with LocalScheduler(log_dir=tmp_path / "logs", preload=()) as scheduler:
            scheduler.create_workers(Job(role="a"))
        assert (
            f"has no record, so helmsman clean will not find it: {planted} is not used"
            in caplog.text
        )


class TestLogs:
    """Workers append to no file but their logs."""

    def test_scheduler_refuses_log_directory_link(self, shared: Path, precious: Path) -> None:
        with LocalScheduler(preload=()) as scheduler:
            log_dir = default_log_dir(scheduler.run_id)
            if log_dir.exists():
                for path in log_dir.iterdir():
                    path.unlink()
                log_dir.rmdir()
            log_dir.symlink_to(precious)
            with pytest.raises(HelmsmanError) as caught:
                scheduler.create_workers(Job(role="a"))
        assert f"{log_dir} is not used: it is a symbolic link" in str(caught.value)

    def test_scheduler_refuses_log_file_link(
        self, shared: Path, precious: Path, tmp_path: Path
    ) -> None:
        with LocalScheduler(log_dir=tmp_path / "logs", preload=()) as scheduler:
            assert_refuses_log_file_link(scheduler, precious)

    @as_another_user
    def test_scheduler_refuses_planted_log_directory(self, shared: Path, precious: Path) -> None:
        (shared / "logs").symlink_to(precious)
        give_to_attacker(shared / "logs")
        with (
            LocalScheduler(log_dir=shared / "logs" / "mine", preload=()) as scheduler,
            pytest.raises(HelmsmanError) as caught,
        ):
            scheduler.create_workers(Job(role="a"))
        assert (
            f"{shared / 'logs'} is not used: it is a symbolic link of nobody (uid {ATTACKER})"
            in str(caught.value)
        )
