"""Tests of the Ray that a scheduler starts for itself, for cases that the day tests leave out."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests.controller.scheduler.ray.scripts import (
    LOSS,
    check_interrupted_start,
    check_unanswered_call,
    loss_reports,
    reports_of,
    run,
)

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("after_s", [0.6, 2.2])
def test_start_interrupted_by_signal(after_s: float) -> None:
    check_interrupted_start(after_s)


SESSION = """
import ray
from helmsman import initialize

def session(cluster, end):
    with contextlib.suppress(SystemExit, ValueError), cluster:
        is_scheduler = hasattr(cluster, "create_workers")
        used = contextlib.nullcontext(cluster) if is_scheduler else make_scheduler("ray")
        with used as scheduler:
            scheduler.create_workers(Job(role="one"))
            path = ray._private.worker._global_node.get_session_dir_path()
            end()
    folder = os.path.dirname(path)
    is_in_tmp = folder == os.environ["RAY_TMPDIR"] + "/ray"
    report(is_in_tmp, os.path.isdir(path + "/logs"), len(os.listdir(folder)))

def fail():
    raise ValueError

session(initialize(num_cpus=1, preload=None), lambda: None)
session(make_scheduler("ray", num_cpus=1), lambda: sys.exit(0))
session(make_scheduler("ray", num_cpus=1), fail)
"""


def test_session_is_kept_after_a_failure_only() -> None:
    """A clean close is not reported as a loss, even if a scheduler has used the cluster."""
    with tempfile.TemporaryDirectory(prefix="he-") as temporary:  # short, for the sockets of Ray
        ended = run(SESSION, TMPDIR=temporary, RAY_TMPDIR=temporary)
        assert ended.stdout.splitlines() == ["True False 0", "True False 0", "True True 2"], (
            ended.stderr
        )
        assert "has ended" not in ended.stderr


def test_unanswered_call_does_not_end_the_script() -> None:
    check_unanswered_call(70)


@pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux",
    reason="making a pid namespace needs root",
)
def test_loss_of_the_raylet_below_init(tmp_path: Path) -> None:
    """Ray takes a parent with pid 1, as in containers and services, for the end of the raylet."""
    launcher = (
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        "sh",
        "-c",
        '"$@"; exit $?',
        "init",
    )
    script = "assert os.getppid() == 1\n" + LOSS
    assert reports_of(script, str(tmp_path), "raylet:close", launcher=launcher) == loss_reports(
        "raylet"
    )
