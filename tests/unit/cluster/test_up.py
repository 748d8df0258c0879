"""Tests of the secret, folder and kept logs of a run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from helmsman._cli import _parser
from helmsman._cluster.up import keep_logs, make_plan, run_folder
from helmsman._process.launchers import ALONE, NodeIdentity
from helmsman.controller._scheduler.run_registry import default_log_dir, read_runs, user_dir


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of all temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_secret_of_a_file_and_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes passes a secret of a file with its last line end."""
    file = tmp_path / "token"
    file.write_text("one two\n")
    identity = NodeIdentity(launcher=ALONE, rank=0, count=1)
    monkeypatch.setenv("HELMSMAN_TOKEN", "one two\n")
    for arguments in (["up"], ["up", "--token-file", str(file)]):
        assert (
            make_plan(_parser().parse_args(arguments), identity, ["true"], "run", tmp_path).secret
            == "one two"
        )


def test_run_folder(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_folder({}) as (run_id, folder):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [(record.run_id, alive) for record, alive in read_runs()] == [(run_id, True)]
    assert not folder.exists()
    assert read_runs() == []
    monkeypatch.chdir("/tmp")
    with run_folder({"RAY_TMPDIR": "."}) as (_, folder):
        assert folder.parent == Path("/tmp"), "Ray would resolve it from another folder"


def test_keep_logs(temporary: Path) -> None:
    folder = temporary / "run"
    logs = folder / "ray" / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("why")
    reported: list[str] = []
    keep_logs("0123456789", folder, reported.append)
    kept = default_log_dir("0123456789")
    assert (kept / "logs" / "raylet.out").read_text() == "why"
    assert reported.pop() == f"Ray's logs of this node are kept in {kept}"
    (folder / "ray_start.log").touch()
    os.rename(user_dir(), temporary / "elsewhere")
    user_dir().touch()  # a file instead of the folder
    keep_logs("0123456789", folder, reported.append)
    assert "cannot be kept in" in reported.pop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become a user without a name")
def test_user_dir_of_a_user_without_a_name(temporary: Path) -> None:
    """The process of a container may have an unknown user id."""
    pid = os.fork()
    if pid == 0:
        for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
            os.environ.pop(variable, None)
        os.setuid(54_321)
        os._exit(0 if user_dir() == temporary / "helmsman-54321" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
