"""Test agents that are programs: their rewards, their limits, and the end of their processes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helmsman.agents import AgentGateway, ProgramFailedError, run_program
from tests.agents.programs import AGENT
from tests.agents.toy_model import question

LEAVES = """
import os, subprocess, sys, time
# A daemon has a session of its own and no parent.
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1] + "/daemon", "w").write(str(os.getpid()))
        time.sleep(3600)
    os._exit(0)
child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
open(sys.argv[1] + "/child", "w").write(str(child.pid))
while not os.path.exists(sys.argv[1] + "/daemon") or not open(sys.argv[1] + "/daemon").read():
    time.sleep(0.01)
if sys.argv[2] == "stay":
    print("ready", flush=True)
    time.sleep(3600)
"""


def pids(folder: Path) -> list[int]:
    return [int((folder / name).read_text()) for name in ("daemon", "child")]


def wait_started(folder: Path) -> None:
    deadline = time.monotonic() + 60
    files = [folder / name for name in ("daemon", "child")]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_ended(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.asyncio
async def test_run_program_ends_processes(tmp_path: Path) -> None:
    await run_program([sys.executable, "-c", LEAVES, str(tmp_path), "exit"], {})
    for pid in pids(tmp_path):
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.asyncio
async def test_run_program_cancelled_ends_processes(tmp_path: Path) -> None:
    program = [sys.executable, "-c", LEAVES, str(tmp_path), "stay"]
    task = asyncio.create_task(run_program(program, {}, timeout=600))
    await asyncio.to_thread(wait_started, tmp_path)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for pid in pids(tmp_path):
        assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(TimeoutError):
        await run_program(["sleep", "3600"], {}, timeout=0.1)


def test_run_program_of_killed_script(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from helmsman.agents import run_program\n"
        f"asyncio.run(run_program([sys.executable, '-c', {LEAVES!r}, {str(tmp_path)!r}, 'stay'], "
        "{}))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        wait_started(tmp_path)
        found = pids(tmp_path)
        process.send_signal(signal.SIGKILL)
    for pid in found:
        wait_ended(pid)


@pytest.mark.asyncio
async def test_run_program_fails() -> None:
    with pytest.raises(ProgramFailedError, match=r"exited with 3; expected 0") as caught:
        await run_program("sh -c 'echo before; echo why >&2; exit 3'", {})
    assert caught.value.output == "before\nwhy\n"
    with pytest.raises(ProgramFailedError, match="no-such-program cannot be started"):
        await run_program("no-such-program", {})


@pytest.mark.asyncio
async def test_run_program_memory_limit() -> None:
    program = [sys.executable, "-c", "bytes(1 << 31)"]
    with pytest.raises(ProgramFailedError, match="MemoryError"):
        await run_program(program, {}, max_memory=1 << 30)


REWARD = """
post(os.environ["HELMSMAN_SESSION_URL"] + "/reward", {"reward": 0.75}, key)
"""


@pytest.mark.asyncio
async def test_run_program_posts_reward(gateway: AgentGateway, tmp_path: Path) -> None:
    with gateway.session() as session:
        environment = {**session.environment, "HELMSMAN_TASK": question(1)}
        await run_program([sys.executable, "-c", AGENT + REWARD], environment, cwd=tmp_path)
    assert session.reward == 0.75
    assert session.num_turns == 1
