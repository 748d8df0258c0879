"""Tests that planted directories, records and links make no command touch files of the victim."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from helmsman._cli import main
from helmsman._cluster.up import run_folder
from helmsman.api.errors import BootstrapExit, UntrustedPathError
from helmsman.controller._scheduler.run_registry import UP, RunLock, read_runs, user_dir
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


class Ended(NamedTuple):
    """The end of a command."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Ended]


@pytest.fixture
def helmsman(capfd: pytest.CaptureFixture[str]) -> Command:
    """Run the command line as the victim."""

    def run(*arguments: str) -> Ended:
        return Ended(main(list(arguments)) or 0, *capfd.readouterr())

    return run


UP_ON_ONE_NODE = ("up", "--show-settings", "--node-rank", "0", "--num-nodes", "1")


class TestForeignUserDirectory:
    """Another user owns the directory in /tmp that has our name."""

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
    def test_clean_and_runs_refuse(
        self, helmsman: Command, command: tuple[str, ...], planted: Path
    ) -> None:
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

    def test_up_refuses(self, helmsman: Command, planted: Path) -> None:
        ended = helmsman(*UP_ON_ONE_NODE)
        assert ended.returncode == BootstrapExit.PREFLIGHT
        assert f"{planted} is not used: it is a directory" in ended.stderr + ended.stdout


class TestRecords:
    """A record in our own directory does not decide which paths are removed."""

    @pytest.fixture(autouse=True)
    def _places(self, shared: Path) -> None:
        """Use the shared directory in every test."""

    @pytest.mark.parametrize("scheduler", [UP, "LocalScheduler"])
    def test_clean_removes_no_path_from_a_record(
        self, helmsman: Command, precious: Path, scheduler: str
    ) -> None:
        record = plant_record(precious, scheduler=scheduler)
        ended = helmsman("clean", "--logs")
        assert f"run {RUN_ID}: dead" in ended.stdout
        assert str(precious) not in ended.stdout
        assert not record.exists()

    def test_up_removes_no_path_from_a_record(self, precious: Path) -> None:
        plant_record(precious)
        with run_folder({}):
            assert [record.run_id for record, _ in read_runs() if record.run_id == RUN_ID] == []

    def test_clean_names_folder_of_other_ray_tmpdir(
        self, helmsman: Command, tmp_path: Path
    ) -> None:
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

    def test_run_lock_refuses_link(self, helmsman: Command, precious: Path) -> None:
        user_dir().symlink_to(precious)
        with pytest.raises(UntrustedPathError, match="is not used: it is a symbolic link"):
            RunLock(RUN_ID, "Test", precious)
        assert helmsman(*UP_ON_ONE_NODE).returncode == BootstrapExit.PREFLIGHT
        assert helmsman("clean", "--logs").returncode == 1


class TestFolders:
    """Folders of sockets and of ``helmsman up``, whose names contain the id of a run."""

    @pytest.mark.parametrize("name", [f"helmsman-{RUN_ID}-x1", f"hm-{RUN_ID}"])
    def test_clean_follows_no_link(
        self, helmsman: Command, shared: Path, precious: Path, name: str
    ) -> None:
        (shared / name).symlink_to(precious)
        plant_record(shared / name)
        ended = helmsman("clean")
        assert ended.returncode == 0, ended.stderr
        assert name not in ended.stdout + ended.stderr

    def test_clean_removes_ours_not_links(
        self, helmsman: Command, shared: Path, precious: Path
    ) -> None:
        name = f"hm-{RUN_ID}"
        (shared / name).mkdir()
        (shared / name / "link").symlink_to(precious)
        plant_record(shared / name)
        assert f"folder {shared / name}" in helmsman("clean").stdout
        assert not (shared / name).exists()

    @as_another_user
    @pytest.mark.parametrize("name", [f"helmsman-{RUN_ID}-x1", f"hm-{RUN_ID}"])
    def test_clean_leaves_other_users(self, helmsman: Command, shared: Path, name: str) -> None:
        (shared / name).mkdir()
        plant_record(shared / name)
        give_to_attacker(shared / name)
        assert name not in helmsman("clean").stdout
        assert (shared / name).exists()

    def test_clean_leaves_up_folder_without_record(self, helmsman: Command, shared: Path) -> None:
        """The run may wait for its head, and its record may lie below another TMPDIR."""
        (shared / f"hm-{RUN_ID}").mkdir()
        assert helmsman("clean").returncode == 0
        assert (shared / f"hm-{RUN_ID}").exists()
