"""Tests of the upkeep of files that cleaners remove or full disks do not take."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helmsman._process.upkeep import Folder, LogFile, Upkeep

OLD_S = 30 * 86400


def _make_old(*paths: Path) -> None:
    for path in paths:
        then = path.stat().st_mtime - OLD_S
        os.utime(path, (then, then))


def _age_s(path: Path) -> float:
    made = path.parent / "now"
    made.touch()
    return made.stat().st_mtime - path.stat().st_mtime


def test_folder_is_locked_for_others(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.renew()
    other = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder.close()
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_folder_that_was_replaced_is_locked_again(tmp_path: Path) -> None:
    path = tmp_path / "logs"
    folder = Folder(path)
    assert not folder.renew(), "one that is missing is not made"
    path.mkdir()
    folder.renew()
    path.rmdir()
    path.mkdir()
    _make_old(path)
    folder.renew()
    assert _age_s(path) < OLD_S / 2
    other = os.open(path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    folder.close()


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="systemd is not installed")
def test_systemd_tmpfiles_skips_a_folder_of_a_run(tmp_path: Path) -> None:
    kept, other = tmp_path / "all" / "kept", tmp_path / "all" / "other"
    for each in (kept, other):
        each.mkdir(parents=True)
        (each / "file").touch()
    folder = Folder(kept)
    folder.renew()
    _make_old(kept / "file", other / "file", kept, other)
    rules = tmp_path / "rules.conf"
    rules.write_text(f"e {tmp_path}/all - - - amAM:1d\n")
    subprocess.run(["systemd-tmpfiles", "--clean", str(rules)], check=True)
    assert (kept / "file").exists()
    assert not (other / "file").exists()
    folder.close()


def test_log_file_on_a_full_disk(tmp_path: Path) -> None:
    reported: list[OSError] = []
    fd = os.open("/dev/full", os.O_WRONLY)
    file = LogFile(fd, report=reported.append)
    for _ in range(3):
        assert file.write(b"lost\n") == 5
    (error,) = reported
    assert error.errno == errno.ENOSPC
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, fd)  # there is room again
    os.close(log)
    file.write(b"kept\n")
    file.close()
    expected = "\nhelmsman: 15 bytes of output are missing here: disk full\nkept\n"
    assert (tmp_path / "log").read_text() == expected


def test_log_file_that_takes_a_part(tmp_path: Path) -> None:
    """A limit of the size of files stands for a disk that is nearly full."""
    code = (
        "import os, resource, sys\n"
        "from helmsman._process.upkeep import LogFile\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))\n"
        "file = LogFile(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND))\n"
        "assert file.write(b'x' * 15) == 15\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))\n"
        "file.write(b'y')\n"
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, tmp_path / "log"], env=environment, check=True)
    text = (tmp_path / "log").read_text()
    assert text == "x" * 10 + "\nhelmsman: 5 bytes of output are missing here: disk full\ny"


def test_upkeep_reports_a_failure_once() -> None:
    texts: list[str] = []
    upkeep = Upkeep(texts.append)
    outcomes: list[bool | OSError] = [OSError(28, "No space left on device", "/logs/a")] * 3
    outcomes += [True, False, OSError(5, "Input/output error")]

    def renew() -> bool:
        outcome = outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    while outcomes:
        upkeep.add("its log /logs/a", renew)
    full, removed, broken = texts
    begin = "its log /logs/a cannot be written: "
    end = ". The run goes on without it and tries again"
    assert full == f"{begin}[Errno 28] No space left on device: '/logs/a'{end}"
    assert removed.startswith("its log /logs/a was removed and begins again. Cleaners of temporary")
    assert broken == f"{begin}[Errno 5] Input/output error{end}"
