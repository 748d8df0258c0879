"""Tests that the failure of a worker names the kernel's OOM killer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helmsman._process.oom import oom_count
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
    """A memory cgroup that is large enough for a scheduler and a worker, and for no large array."""
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
