"""A removed session folder of an embedded Ray is named when a worker is to start."""

from __future__ import annotations

import tempfile

import pytest

pytest.importorskip("ray")

from tests.controller.scheduler.ray.scripts import run

REMOVED = """
import shutil

with make_scheduler("ray", address="local", num_cpus=2, preload=()) as scheduler:
    scheduler.create_workers(Job(role="a"))
    shutil.rmtree(os.environ["RAY_TMPDIR"] + "/ray")
    try:
        scheduler.create_workers(Job(role="b"))
    except Exception as error:
        report(type(error).__name__, error)
    report(len(scheduler.get_workers("a")))
"""


@pytest.mark.timeout(120)
def test_session_folder_removed() -> None:
    with tempfile.TemporaryDirectory(prefix="he-") as temporary:  # short, for the sockets of Ray
        ended = run(REMOVED, TMPDIR=temporary, RAY_TMPDIR=temporary)
        failure, number = ended.stdout.splitlines()
        assert failure.startswith("WorkerStartError worker b/0"), ended.stderr
        assert f"Ray's session folder {temporary}/ray/session_" in failure
        assert "was removed, expected its sockets" in failure
        assert "Start the script again, with RAY_TMPDIR at a folder that is not cleaned" in failure
        assert number == "1", "a worker that runs is not affected"
