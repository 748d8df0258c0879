"""An end by the kernel's OOM killer is told from other ends by SIGKILL."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helmsman.rpc_server._process.oom import OomCount, oom_count, oom_kills_since
from tests.contract.helpers import wait_until

SCRIPT = """
import asyncio, sys
from helmsman import Job, make_scheduler
from helmsman.api import errors

with make_scheduler("local", preload=()) as scheduler:
    (worker,) = scheduler.create_workers(Job(role="a"))
    try:
        asyncio.run(scheduler.create_engine(worker, "os.urandom", None, 1 << 29))
    except errors.WorkerFailedError as error:
        print(error.cause)
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup that holds a scheduler and a worker, and no large array besides."""
    own = oom_count()
    parent = Path("/") if own is None else Path(own.path).parent
    group = parent / f"helmsman-test-{os.getpid()}"
    limit = (
        "memory.max"
        if own is not None and own.path.endswith("memory.events")
        else "memory.limit_in_bytes"
    )
    try:
        group.mkdir()
        (group / limit).write_text(str(300 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made in {parent}: {error}")
    yield group

    def is_removed() -> bool:
        try:
            group.rmdir()
        except OSError:  # the last processes of the run are still exiting
            return False
        return True

    wait_until(is_removed, "the memory cgroup is removed")


@pytest.mark.slow
def test_oom_kill_named_in_worker_failure(small_group: Path) -> None:
    join = f"import os; open({str(small_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", join + SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        env=environ,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == (
        "was ended by SIGKILL (most likely by the kernel's OOM killer, which has ended 1 process "
        "of its memory cgroup since it "
        "started)"
    )


def test_oom_kills_since(tmp_path: Path) -> None:
    count = tmp_path / "memory.events"
    count.write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert oom_kills_since(OomCount(str(count), 1)) == 2
    assert oom_kills_since(OomCount(str(count), 3)) == 0
    assert oom_kills_since(OomCount(str(tmp_path / "gone"), 0)) == 0
    assert oom_kills_since(None) == 0
    assert oom_count() is not None or not Path("/proc/vmstat").exists()
