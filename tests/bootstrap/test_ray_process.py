"""Ray's processes on a node: what their supervisor knows of them, and that they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from helmsman.api.errors import RayDiedError
from helmsman.controller.bootstrap.ray_process import RayProcess
from helmsman.rpc_server.guardian import TAG_VARIABLE
from tests.contract.helpers import processes_with

STARTED = "print('Ray runtime started.', flush=True)\n"
STAYS = "import signal\n" + STARTED + "signal.pause()"

MakeRay = Callable[..., RayProcess]


@pytest.fixture
def tag() -> str:
    return f"{secrets.token_hex(6)}/up"


@pytest.fixture
async def make_ray(tmp_path: Path, tag: str) -> AsyncIterator[MakeRay]:
    made: list[RayProcess] = []

    def make(source: str, start_s: float = 30.0) -> RayProcess:
        made.append(RayProcess([sys.executable, "-I", "-S", "-c", source], os.environ, tag, tmp_path / "log", start_s))
        return made[-1]

    yield make
    for ray in made:
        await ray.stop()
    assert not processes_with(TAG_VARIABLE, tag)


async def test_a_life(make_ray: MakeRay, tag: str) -> None:
    ray = make_ray(STAYS)
    await ray.start()
    (pid,) = processes_with(TAG_VARIABLE, tag).values()
    ended = asyncio.ensure_future(ray.ended())
    os.kill(pid, signal.SIGTERM)
    assert await ended == "ray start has ended by SIGTERM"
    assert await ray.ended() == await ended, "which is told as often as it is asked"
    await ray.stop()
    await ray.stop()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import sys; print('no room'); sys.exit(3)",
            "ray start has ended with exit code 3; the end of what it printed:\nno room",
        ),
        ("import os; os.kill(os.getpid(), 9)", "ray start has ended by SIGKILL"),
        ("print('odd \\udcff'.encode(errors='surrogateescape'), end='', flush=True)", "ray start has ended with exit code 0"),
    ],
)
async def test_an_end_before_it_was_up(make_ray: MakeRay, source: str, said: str) -> None:
    with pytest.raises(RayDiedError) as caught:
        await make_ray(source).start()
    assert f"Ray did not start on this node: {said}" in str(caught.value)


async def test_a_start_that_takes_too_long(make_ray: MakeRay) -> None:
    with pytest.raises(RayDiedError, match=r"did not start on this node within 0\.1 s"):
        await make_ray("import signal; signal.pause()", start_s=0.1).start()


async def test_a_start_that_is_broken_off_at_once_leaves_nothing(make_ray: MakeRay, tag: str) -> None:
    """As where a signal comes while the process is made."""
    ray = make_ray(STAYS)
    starting = asyncio.ensure_future(ray.start())
    await asyncio.sleep(0)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    await ray.stop()
    assert not processes_with(TAG_VARIABLE, tag)


async def test_nothing_to_end(make_ray: MakeRay) -> None:
    await make_ray(STAYS).stop()


async def test_all_that_it_has_started_ends_with_it(make_ray: MakeRay, tag: str) -> None:
    """Also what has left its session, and does not listen."""
    child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    spawn = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-I', '-S', '-c', {child!r}], start_new_session=True)\n"
    ray = make_ray(spawn + STAYS)
    await ray.start()
    assert len(processes_with(TAG_VARIABLE, tag)) == 2
    await ray.stop()
    assert not processes_with(TAG_VARIABLE, tag)
