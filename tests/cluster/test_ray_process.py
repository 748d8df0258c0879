"""Tests that the supervisor detects and ends the Ray processes of a node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from helmsman._cluster.async_utils import StatusPrinter
from helmsman._cluster.ray_process import RayProcess
from helmsman._process.guardian import TAG_VARIABLE
from helmsman.api.errors import BootstrapError
from helmsman.controller._scheduler.ray import start_limits
from tests.cluster.nodes import make_plan
from tests.contract.helpers import processes_with

STARTED = "print('Ray runtime started.', flush=True)\n"
STAYS = "import signal\n" + STARTED + "signal.pause()"

MakeRay = Callable[..., RayProcess]


@pytest.fixture
def tag() -> str:
    return f"{secrets.token_hex(5)}/up"


@pytest.fixture
async def make_ray(tmp_path: Path, tag: str) -> AsyncIterator[MakeRay]:
    made: list[RayProcess] = []

    def make(source: str, start_s: float = 30.0, report: StatusPrinter = print) -> RayProcess:
        command = [sys.executable, "-I", "-S", "-c", source]
        plan = make_plan(
            tmp_path, run_id=tag.partition("/")[0], ray_command=command, ray_start_s=start_s
        )
        made.append(RayProcess(plan, os.environ, report))
        return made[-1]

    yield make
    for ray in made:
        await ray.stop()
    assert not processes_with(TAG_VARIABLE, tag)


async def test_ray_process_lives_and_ends(make_ray: MakeRay, tag: str) -> None:
    ray = make_ray(STAYS)
    assert await ray.start("run-1") == "127.0.0.1:6379"
    (pid,) = processes_with(TAG_VARIABLE, tag).values()
    os.kill(pid, signal.SIGTERM)
    assert await ray.ended == "ray start was ended by SIGTERM"
    await ray.stop()
    await ray.stop()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import sys; print('no room'); sys.exit(3)",
            "ray start exited with code 3; the end of its output:\nno room",
        ),
        ("import os; os.kill(os.getpid(), 9)", "ray start was ended by SIGKILL"),
        (
            "print('odd \\udcff'.encode(errors='surrogateescape'), end='', flush=True)",
            "ray start exited with code 0",
        ),
    ],
)
async def test_ray_process_that_ends_in_its_start(
    make_ray: MakeRay, source: str, said: str
) -> None:
    with pytest.raises(BootstrapError) as caught:
        await make_ray(source).start("run-1")
    assert f"Ray did not start on this node: {said}" in str(caught.value)


async def test_ray_process_start_timeout(make_ray: MakeRay) -> None:
    reported: list[str] = []
    with pytest.raises(
        BootstrapError, match=r"did not start on this node within 0\.1 s.*raise --start-timeout"
    ):
        await make_ray("import signal; signal.pause()", start_s=0.1, report=reported.append).start(
            "run-1"
        )
    assert reported == [], "there is no time for a second try"


async def test_ray_process_start_is_tried_once_more(make_ray: MakeRay, tmp_path: Path) -> None:
    first = (
        f"import os, sys; open({str(tmp_path / 'tried')!r}, 'x')\nprint('no luck'); sys.exit(1)\n"
    )
    reported: list[str] = []
    ray = make_ray(
        f"try:\n    exec({first!r})\nexcept FileExistsError:\n    pass\n{STAYS}",
        report=reported.append,
    )
    await ray.start("run-1")
    assert len(reported) == 1
    for fact in (
        "exited with code 1",
        "no luck",
        "Ray is started once more (after ",
        "of at most 30 s",
    ):
        assert fact in reported[0]
    assert not ray.ended.done(), "the future belongs to the second try"


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
async def test_ray_process_start_detects_a_dead_process(
    make_ray: MakeRay, tmp_path: Path, name: str
) -> None:
    """Ray itself waits 20 to 30 s for the process, and does not print the reason of its end."""
    program = tmp_path / name
    shutil.copy(str(shutil.which("true")), program)
    logs = tmp_path / "ray" / "session_2026-01-01" / "logs"
    logs.mkdir(parents=True)
    reason = (
        "[2026-11-22 06:56:24,840 C 1236 1236] (gcs_server) gcs_server.cc:951: Unsupported "
        "GCS storage type"
    )
    (logs / f"{name}.err").write_text(
        f"[2026-11-22 06:56:24,839 I 1236 1236] all is well\n{reason}\n"
    )
    (logs / f"{name}.out").write_text(f"{reason}\n")
    source = (
        f"import signal, subprocess\nchild = subprocess.Popen([{str(program)!r}])\nsignal.pause()"
    )
    with pytest.raises(BootstrapError) as caught:
        await make_ray(source).start("run-1")
    assert f"{name} has ended; the end of its output:\n\n{name}.err: {reason}" in str(caught.value)
    assert str(caught.value).count(reason) == 1
    assert "all is well" not in str(caught.value)


def test_ray_start_waits_for_a_raylet_that_registers_late(monkeypatch: pytest.MonkeyPatch) -> None:
    services = pytest.importorskip("ray._private.services")
    scripts = pytest.importorskip("ray.scripts.scripts")
    asked: list[str] = []

    def get_node(gcs_address: str, node_id: str) -> str:
        asked.append(node_id)
        if len(asked) < 3:
            raise RuntimeError("no such node")
        return f"{node_id} at {gcs_address}"

    found: list[str] = []
    monkeypatch.setattr(scripts, "main", lambda: found.append(services.get_node("here", "node")))
    for limit, calls in (("0", 1), ("30", 3)):
        asked.clear()
        monkeypatch.setattr(services, "get_node", get_node)
        monkeypatch.setenv(start_limits.LIMIT_VARIABLE, limit)
        with pytest.raises(TimeoutError) if limit == "0" else contextlib.nullcontext():
            start_limits.main()
        assert len(asked) == calls
    assert found == ["node at here"]


async def test_ray_process_stop_after_a_cancelled_start(make_ray: MakeRay, tag: str) -> None:
    """A signal arrives while the process is started."""
    ray = make_ray(STAYS)
    await ray.stop()  # there is nothing to end yet
    starting = asyncio.ensure_future(ray.start("run-1"))
    await asyncio.sleep(0)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    await ray.stop()
    assert not processes_with(TAG_VARIABLE, tag)


async def test_ray_process_stop_ends_all_children(make_ray: MakeRay, tag: str) -> None:
    """A child has left the session and ignores SIGTERM."""
    child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    spawn = (
        "import subprocess, sys\nsubprocess.Popen([sys.executable, '-I', '-S', '-c', "
        f"{child!r}], start_new_session=True)\n"
    )
    ray = make_ray(spawn + STAYS)
    await ray.start("run-1")
    assert len(processes_with(TAG_VARIABLE, tag)) == 2
    await ray.stop()
    assert not processes_with(TAG_VARIABLE, tag)
