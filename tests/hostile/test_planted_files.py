"""Another user plants directories, records and links where Helmsman keeps its own; nothing of a
victim's is touched.
"""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helmsman.api.errors import BootstrapExit, HelmsmanError, UntrustedPathError, WorkerStartError
from helmsman.api.scheduler import Job
from helmsman.controller._bootstrap.up import run_folder
from helmsman.controller._node.run_registry import (
    UP,
    RunLock,
    RunRecord,
    default_log_dir,
    read_runs,
    user_dir,
)
from helmsman.controller._schedulers.factory import make_scheduler
from tests.contract.helpers import ROOT

ATTACKER = 65_534
RUN_ID = "0123456789"
OPTIONS: dict[str, dict[str, Any]] = {
    "local": {"preload": ()},
    "ray": {"address": "local", "num_cpus": 2, "preload": None},
}

NEEDS_ROOT = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user"),
]


def as_another_user(test: Any) -> Any:
    """Mark a test that acts as another user."""
    return NEEDS_ROOT[0](NEEDS_ROOT[1](test))


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files as /tmp is: everyone may write to it, and only owners may
    remove.

    ``tmp_path`` is made first, so that it lies elsewhere.
    """
    with tempfile.TemporaryDirectory(prefix="hh-") as path:  # short, for the sockets of Ray
        os.chmod(path, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", path)
        for name in ("TMPDIR", "RAY_TMPDIR"):
            monkeypatch.setenv(name, path)
        yield Path(path)


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A directory of the victim's with a file; both must be as they were at the end."""
    path = tmp_path / "precious"
    path.mkdir()
    (path / "thesis.txt").write_text("years of work")
    yield path
    assert os.listdir(path) == ["thesis.txt"]
    assert (path / "thesis.txt").read_text() == "years of work"


def plant_record(log_dir: Path, *, name: str = RUN_ID, **changes: Any) -> Path:
    """A record of a dead run of ``helmsman up`` whose folder is said to be ``log_dir``."""
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
    """A tree becomes the attacker's."""
    for each in (path, *path.rglob("*")):
        os.chown(each, ATTACKER, ATTACKER, follow_symlinks=False)


def helmsman(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, as the victim runs it."""
    return subprocess.run(
        [sys.executable, "-m", "helmsman", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )


UP_ON_ONE_NODE = ("up", "--show-settings", "--node-rank", "0", "--num-nodes", "1")


class TestAnothersDirectoryOfOurName:
    """The first user to make a directory in /tmp owns it."""

    pytestmark = NEEDS_ROOT

    @pytest.fixture(autouse=True)
    def planted(self, shared: Path, precious: Path) -> Path:
        plant_record(precious)
        (user_dir() / RUN_ID).symlink_to(precious)
        give_to_attacker(user_dir())
        return user_dir()

    @pytest.mark.parametrize(
        "command", [("clean",), ("clean", "--logs", "--run", RUN_ID), ("runs",)]
    )
    def test_clean_and_runs_refuse_it(self, command: tuple[str, ...], planted: Path) -> None:
        ended = helmsman(*command)
        assert ended.returncode == 1
        assert f"{planted} is not used: it is a directory" in ended.stderr
        for fact in (
            f"of nobody (uid {ATTACKER})",
            f"expected a directory of {getpass.getuser()} (uid 0)",
            "TMPDIR",
        ):
            assert fact in ended.stderr
        assert "dead" not in ended.stdout

    def test_up_refuses_it(self, planted: Path) -> None:
        ended = helmsman(*UP_ON_ONE_NODE)
        assert ended.returncode == BootstrapExit.PREFLIGHT
        assert f"{planted} is not used: it is a directory" in ended.stderr + ended.stdout

    def test_scheduler_writes_no_logs_there(self, planted: Path) -> None:
        before = sorted(os.listdir(planted))
        with (
            make_scheduler("local", preload=()) as scheduler,
            pytest.raises(HelmsmanError) as caught,
        ):
            scheduler.create_workers(Job(role="a"))
        assert f"{planted} is not used: it is a directory" in str(caught.value)
        assert sorted(os.listdir(planted)) == before

    def test_scheduler_without_record_warns(
        self, planted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with make_scheduler("local", log_dir=tmp_path / "logs", preload=()) as scheduler:
            scheduler.create_workers(Job(role="a"))
        assert (
            f"has no record, so helmsman clean will not find it: {planted} is not used"
            in caplog.text
        )


class TestRecords:
    """A record in our own directory never says what is removed."""

    @pytest.fixture(autouse=True)
    def _places(self, shared: Path) -> None:
        """All of it happens there."""

    @pytest.mark.parametrize("scheduler", [UP, "LocalScheduler"])
    def test_clean_removes_no_path_from_a_record(self, precious: Path, scheduler: str) -> None:
        record = plant_record(precious, scheduler=scheduler)
        ended = helmsman("clean", "--logs")
        assert f"run {RUN_ID}: dead" in ended.stdout
        assert str(precious) not in ended.stdout
        assert not record.exists()

    def test_up_removes_no_path_from_a_record(self, precious: Path) -> None:
        plant_record(precious)
        with run_folder({}):
            assert [record.run_id for record, _ in read_runs() if record.run_id == RUN_ID] == []

    def test_clean_names_folder_of_other_ray_tmpdir(self, tmp_path: Path) -> None:
        folder = tmp_path / f"hm-{RUN_ID}"
        folder.mkdir()
        plant_record(folder)
        ended = helmsman("clean")
        assert ended.returncode == 1
        assert f"{folder} is not removed" in ended.stderr
        assert f"RAY_TMPDIR={tmp_path} helmsman clean --run {RUN_ID}" in ended.stderr
        assert folder.exists()
        os.environ["RAY_TMPDIR"] = str(tmp_path)  # restored by the fixture
        assert helmsman("clean", "--run", RUN_ID).returncode == 0
        assert not folder.exists()

    @pytest.mark.parametrize("run_id", ["..", "../..", "", "01234567AB", "fedcba9876"])
    def test_read_runs_wrong_run_id(self, precious: Path, run_id: str) -> None:
        plant_record(precious, run_id=run_id)
        assert read_runs() == [] or all(record.run_id != run_id for record, _ in read_runs())

    def test_read_runs_ignores_link(self, precious: Path, tmp_path: Path) -> None:
        record = plant_record(precious)
        record.replace(tmp_path / "elsewhere.json")
        record.symlink_to(tmp_path / "elsewhere.json")
        assert all(found.run_id != RUN_ID for found, _ in read_runs())

    @as_another_user
    def test_read_runs_ignores_other_user(self, precious: Path) -> None:
        give_to_attacker(plant_record(precious))
        assert all(found.run_id != RUN_ID for found, _ in read_runs())

    def test_run_lock_refuses_writable_directory(self, precious: Path) -> None:
        plant_record(precious)
        user_dir().chmod(0o777)
        with pytest.raises(
            UntrustedPathError, match="is not used: it is a directory with mode 0777"
        ):
            RunLock("fedcba9876", "Test", precious)
        assert all(found.run_id != RUN_ID for found, _ in read_runs())

    def test_run_lock_closes_readable_directory(self, precious: Path) -> None:
        plant_record(precious)
        user_dir().chmod(0o755)
        RunLock("fedcba9876", "Test", precious).release()
        assert user_dir().stat().st_mode & 0o777 == 0o700

    def test_run_lock_refuses_link(self, precious: Path) -> None:
        user_dir().symlink_to(precious)
        with pytest.raises(UntrustedPathError, match="is not used: it is a symbolic link"):
            RunLock(RUN_ID, "Test", precious)
        assert helmsman(*UP_ON_ONE_NODE).returncode == BootstrapExit.PREFLIGHT
        assert helmsman("clean", "--logs").returncode == 1


class TestFolders:
    """Directories for sockets, and of ``helmsman up``, whose names are made from the id of a
    run.
    """

    @pytest.mark.parametrize("name", [f"helmsman-{RUN_ID}-x1", f"hm-{RUN_ID}"])
    def test_clean_follows_no_link(self, shared: Path, precious: Path, name: str) -> None:
        (shared / name).symlink_to(precious)
        plant_record(shared / name)
        ended = helmsman("clean")
        assert ended.returncode == 0, ended.stderr
        assert name not in ended.stdout + ended.stderr

    @pytest.mark.parametrize("name", [f"helmsman-{RUN_ID}-x1", f"hm-{RUN_ID}"])
    def test_clean_removes_ours_not_links(self, shared: Path, precious: Path, name: str) -> None:
        (shared / name).mkdir()
        (shared / name / "link").symlink_to(precious)
        plant_record(shared / name)
        assert f"folder {shared / name}" in helmsman("clean").stdout
        assert not (shared / name).exists()

    @as_another_user
    @pytest.mark.parametrize("name", [f"helmsman-{RUN_ID}-x1", f"hm-{RUN_ID}"])
    def test_clean_leaves_other_users(self, shared: Path, name: str) -> None:
        (shared / name).mkdir()
        plant_record(shared / name)
        give_to_attacker(shared / name)
        assert name not in helmsman("clean").stdout
        assert (shared / name).exists()

    def test_clean_leaves_up_folder_without_record(self, shared: Path) -> None:
        """The run may wait for its head, without a process but its own, and have its record below
        another TMPDIR.
        """
        (shared / f"hm-{RUN_ID}").mkdir()
        assert helmsman("clean").returncode == 0
        assert (shared / f"hm-{RUN_ID}").exists()


class TestLogs:
    """Workers append to their logs, and to nothing else."""

    def test_scheduler_refuses_log_directory_link(self, shared: Path, precious: Path) -> None:
        with make_scheduler("local", preload=()) as scheduler:
            log_dir = default_log_dir(scheduler.run_id)  # type: ignore[attr-defined]
            if log_dir.exists():
                for path in log_dir.iterdir():
                    path.unlink()
                log_dir.rmdir()
            log_dir.symlink_to(precious)
            with pytest.raises(HelmsmanError) as caught:
                scheduler.create_workers(Job(role="a"))
        assert f"{log_dir} is not used: it is a symbolic link" in str(caught.value)

    @pytest.mark.parametrize("backend", OPTIONS)
    def test_scheduler_refuses_log_file_link(
        self, backend: str, shared: Path, precious: Path, tmp_path: Path
    ) -> None:
        log_dir = tmp_path / "logs"
        log_dir.mkdir()
        log = log_dir / "a-0.log"
        log.symlink_to(precious / "thesis.txt")
        with make_scheduler(backend, log_dir=log_dir, **OPTIONS[backend]) as scheduler:
            with pytest.raises(WorkerStartError) as caught:
                scheduler.create_workers(Job(role="a"))
            assert f"{log} is not used: it is a symbolic link" in str(caught.value)
            assert "expected a regular file" in str(caught.value)
            log.unlink()
            scheduler.create_workers(Job(role="a"))
            assert log.stat().st_mode & 0o777 == 0o600

    @as_another_user
    def test_scheduler_refuses_planted_log_directory(self, shared: Path, precious: Path) -> None:
        (shared / "logs").symlink_to(precious)
        give_to_attacker(shared / "logs")
        with (
            make_scheduler("local", log_dir=shared / "logs" / "mine", preload=()) as scheduler,
            pytest.raises(HelmsmanError) as caught,
        ):
            scheduler.create_workers(Job(role="a"))
        assert (
            f"{shared / 'logs'} is not used: it is a symbolic link of nobody (uid {ATTACKER})"
            in str(caught.value)
        )
