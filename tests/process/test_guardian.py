"""Tests that the guardian finds a family by its marks, records how a worker ended, and ends the
remaining processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helmsman._desk.cleanup import leftovers
from helmsman._process import guardian

pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="families are found through /proc"
)

STAY = "import signal; print('up', flush=True); signal.pause()"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that waits for a signal; all are ended after the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(script: str = STAY, **options: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, **options
        )  # type: ignore[call-overload]
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def _is_running(pid: int) -> bool:
    row = guardian.process_table().get(pid)
    return row is not None and row.state != "Z"


def test_family_by_each_mark(start: Callable[..., subprocess.Popen[str]]) -> None:
    tag = f"0123456789/{os.urandom(4).hex()}"
    marked = {**os.environ, guardian.TAG_VARIABLE: tag}
    worker = start(
        f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {STAY!r}]); "
        "print(c.pid, flush=True); c.wait()",
        start_new_session=True,
    )
    (child,) = guardian.descendants(worker.pid, guardian.process_table())
    tagged = start(env=marked, start_new_session=True)
    other = start(env={**os.environ, guardian.TAG_VARIABLE: f"{tag}0"}, start_new_session=True)
    hidden = start(_bearing("0123456789", worker.pid), start_new_session=True)
    others = start(_bearing("0123456789", worker.pid + 1), start_new_session=True)
    assert guardian.family(worker.pid, tag) == {child, tagged.pid, hidden.pid}
    worker.kill()
    worker.wait()
    assert guardian.family(worker.pid, tag) == {child, tagged.pid, hidden.pid}, (
        "the family is also found when its parent has exited"
    )
    assert guardian.end_family(worker.pid, tag) == set()
    assert not any(map(_is_running, (child, tagged.pid, hidden.pid)))
    assert _is_running(other.pid), "its tag only has the same beginning"
    assert _is_running(others.pid), "it bears the mark of another worker"


def _bearing(run_id: str, worker_pid: int, *, uid: int | None = None) -> str:
    """Return a script that bears a mark and waits, as user ``uid`` if it is given."""
    # The owner of its entry in /proc is root then: PR_SET_DUMPABLE.
    become = (
        ""
        if uid is None
        else f"import ctypes, os; os.setuid({uid}); ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); "
    )
    return (
        f"from helmsman._process.guardian import *; bear_mark(Mark({run_id!r}, "
        f"{worker_pid})); {become}{STAY}"
    )


def test_mark_survives_new_session_and_environment(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    child = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', %r], env={}, "
        "start_new_session=True)"
    )
    marked = start(_bearing("00ff00ff00", 4194303).replace(STAY, child % STAY))
    marked.wait()
    (hidden,) = guardian.run_members("00ff00ff00")
    assert guardian.mark_of(hidden) == ("00ff00ff00", 4194303)
    assert guardian.end_all(lambda: guardian.run_members("00ff00ff00")) == set()
    assert not _is_running(hidden)


def _guarded(
    start: Callable[..., subprocess.Popen[str]], log_path: str, end: str = ""
) -> subprocess.Popen[str]:
    """Start a process with a guardian; it ends when it reads a line."""
    script = (
        "import os, sys; from helmsman._process.guardian import spawn_guardian; "
        f"spawn_guardian('0123456789/x', {log_path!r}); print('up', flush=True); "
        f"sys.stdin.readline(); {end}"
    )
    return start(script, stdin=subprocess.PIPE, start_new_session=True)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("os.kill(os.getpid(), 9)", {"exit_code": None, "exit_signal": signal.SIGKILL}),
        ("os._exit(7)", {"exit_code": 7, "exit_signal": None}),
        ("sys.exit(0)", {"exit_code": 0, "exit_signal": None}),
    ],
)
@pytest.mark.parametrize("is_reaped", [True, False])
def test_guardian_records_exit(
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    end: str,
    expected: dict[str, int | None],
    is_reaped: bool,
) -> None:
    if is_reaped and tuple(int(part) for part in os.uname().release.split(".")[:2]) < (6, 15):
        pytest.skip("kernels before 6.15 report the exit of a process only until it is reaped")
    log_path = str(tmp_path / "worker.log")
    process = _guarded(start, log_path, end)
    assert guardian.read_record(log_path, process.pid) is None
    if is_reaped:
        process.communicate("\n")
    else:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert guardian.wait_until(
        lambda: guardian.read_record(log_path, process.pid) is not None, 10.0
    )
    assert guardian.read_record(log_path, process.pid) == expected
    assert guardian.read_record(log_path, process.pid + 1) is None, (
        "a successor with the same log is still running"
    )
    process.communicate()


def test_guardian_record_in_directory_of_log(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """A link replaces the directory while the worker runs."""
    logs, victim = tmp_path / "logs", tmp_path / "victim"
    logs.mkdir()
    victim.mkdir()
    log_path = str(logs / "worker.log")
    process = _guarded(start, log_path)
    logs.rename(tmp_path / "moved")
    logs.symlink_to(victim)
    process.communicate("\n")
    assert guardian.wait_until(lambda: (tmp_path / "moved" / "worker.log.exit").exists(), 10.0)
    assert list(victim.iterdir()) == []


def test_process_table_unusual_names(start: Callable[..., subprocess.Popen[str]]) -> None:
    unusual = start(
        "open('/proc/self/comm', 'w').write(') R 1 (x'); print('up', flush=True); import signal; "
        "signal.pause()"
    )
    row = guardian.process_table()[unusual.pid]
    assert (row.pid, row.parent) == (unusual.pid, os.getpid())
    assert row.state in "SR"


def test_end_family_removes_shared_memory(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    made = tmp_path / "name"
    child = (
        "import signal\nfrom multiprocessing import shared_memory\n"
        f"memory = shared_memory.SharedMemory(create=True, size=1)\nopen({str(made)!r}, "
        "'w').write(memory.name)\n"
        "print('up', flush=True)\nsignal.pause()"
    )
    worker = start(child, start_new_session=True)
    worker.kill()
    worker.wait()
    assert guardian.end_family(worker.pid, "no tag") == set()
    assert not Path("/dev/shm", made.read_text()).exists()


OTHER_USERS = (65_533, 65_534)

as_other_users = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users"),
]


class TestOtherUsers:
    """Every user can read a mark and give it to processes of their own."""

    pytestmark = as_other_users

    def test_family_excludes_other_users(self, start: Callable[..., subprocess.Popen[str]]) -> None:
        worker, attacker = OTHER_USERS
        copied = start(_bearing("0123456789", 4194303, uid=attacker), start_new_session=True)
        hidden = start(_bearing("0123456789", 4194303, uid=worker), start_new_session=True)
        found = _as_user(
            worker,
            lambda: guardian.family(4194303, "0123456789/a") | guardian.run_members("0123456789"),
        )
        assert found == str({hidden.pid})
        assert (
            _as_user(worker, lambda: guardian.end_family(4194303, "0123456789/a", limit_s=1.0))
            == "set()"
        )
        assert _is_running(copied.pid)
        assert not _is_running(hidden.pid)

    def test_leftovers_exclude_other_users(
        self, start: Callable[..., subprocess.Popen[str]]
    ) -> None:
        stay = (
            "os.execve('/bin/sh', ['sh', '-c', 'echo up; exec sleep 600'], "
            "{b'HELMSMAN_WORKER_TAG': b'\\xff'})"
        )
        start(f"import os; os.setuid({OTHER_USERS[1]}); {stay}")
        start(_bearing("0123456789", 0, uid=OTHER_USERS[1]))
        assert [left for left in leftovers() if left.run_id in ("0123456789", "\ufffd")] == []

    def test_leftovers_unreadable_environment(
        self, start: Callable[..., subprocess.Popen[str]]
    ) -> None:
        hidden = start(_bearing("0123456789", 0, uid=OTHER_USERS[0]))
        found = _as_user(
            OTHER_USERS[0],
            lambda: [each.pid for left in leftovers(["0123456789"]) for each in left.processes],
        )
        assert found == str([hidden.pid])


def _as_user(uid: int, function: Callable[[], object]) -> str:
    """Call a function as another user, and return its result as text."""
    theirs, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(uid)
            os.write(ours, str(function()).encode())
        finally:
            os._exit(0)
    os.close(ours)
    with open(theirs) as file:
        result = file.read()
    os.waitpid(pid, 0)
    return result
