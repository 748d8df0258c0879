"""Cost of ``helmsman up``, compared with the bare ``ray start`` that it supervises."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile

from benchmarks.harness import Pair, case
from benchmarks.world import World

_STARTED = b"Ray runtime started."


@case(
    "up.alone",
    unit="s",
    floor="ray start --head --block until it says that it has started, and its end by SIGTERM",
)
def alone(world: World) -> Pair:
    """Start Ray on one node, run an empty script, and end everything."""
    folder = tempfile.mkdtemp(prefix="up-", dir="/tmp")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": folder,
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }

    def ours() -> None:
        command = [sys.executable, "-m", "helmsman._cli", "up", "--", "true"]
        subprocess.run(command, env=environ, check=True, stderr=subprocess.DEVNULL, timeout=120)

    def floor() -> None:
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            "--block",
            "--port=0",
            "--disable-usage-stats",
        ]
        with subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as started:
            assert started.stdout is not None
            next(line for line in started.stdout if _STARTED in line)
            started.send_signal(signal.SIGTERM)
            started.wait(60)

    return Pair(ours=ours, floor=floor, rounds=4)
