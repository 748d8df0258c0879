"""Test that programs forked by the zygote behave like those that Python starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import zygote
from tests.contract.helpers import wait_gone

SHOW = """
import json, os, sys
environ = open("/proc/self/environ").read().split("\\0")
print(json.dumps([__name__, os.getcwd(), sys.argv, dict(os.environ), environ]))
"""


@pytest.mark.parametrize(("way", "program"), [("-c", SHOW), ("-m", "show")])
def test_run_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, program: str
) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, way, program, "x"]
    ran = zygote.run(command, env={"PYTHONPATH": "/nowhere"}, timeout=60)
    assert ran.returncode == 0, ran.stderr
    name, folder, argv, environ, shown = json.loads(ran.stdout)
    assert (name, folder, environ) == ("__main__", str(tmp_path), {"PYTHONPATH": "/nowhere"})
    assert argv == ["-c" if way == "-c" else str(tmp_path / "show.py"), "x"]
    session = os.environ[zygote.SESSION_ENV_VAR]
    assert f"{zygote.SESSION_ENV_VAR}={session}" in shown, "leftovers can be found"


@pytest.mark.parametrize(
    ("code", "exit_code", "error"),
    [
        ("", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('reason')", 1, "reason"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 2)", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM, ""),
    ],
)
def test_run_exit_code(code: str, exit_code: int, error: str) -> None:
    ran = zygote.run([sys.executable, "-c", code], timeout=60)
    assert (ran.returncode, ran.stdout) == (exit_code, "")
    assert error in ran.stderr


def test_run_time_limit() -> None:
    code = "import time; print('begun', flush=True); time.sleep(1000)"
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        zygote.run([sys.executable, "-c", code], timeout=1.0)
    assert raised.value.stdout in ("begun\n", "")


OWNER = """
import sys
from tests import zygote
print(zygote.start([sys.executable, "-c", "import time; time.sleep(1000)"]).pid)
"""


def test_start_program_ends_with_owner() -> None:
    environ = {key: value for key, value in os.environ.items() if "XDIST" not in key}
    ran = subprocess.run(
        [sys.executable, "-c", OWNER],
        env={**environ, "PYTHONPATH": str(zygote.ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    wait_gone({"the program": int(ran.stdout)})


def test_start_module_missing() -> None:
    with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
        zygote.start([sys.executable, "-c", ""], preload=["no_such_module"])
