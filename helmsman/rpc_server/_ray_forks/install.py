"""Driver's end of an embedded Ray's fork server: starts it and routes worker starts through it.

The entry point is ``forked_workers``; its argument ``preload`` switches forking on. The patches of
Ray are in ray_patches.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helmsman._process.driver_watch import pidfd_of_this_process
from helmsman._process.environment import absolute_search_path
from helmsman._process.guardian import TAG_VARIABLE
from helmsman._process.safe_files import open_log
from helmsman.rpc_server._ray_forks import client as ray_fork_client
from helmsman.rpc_server._ray_forks.ray_patches import replaced, through_client

log = logging.getLogger(__name__)

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = filter(None, sys.path); "
    "more = [folder for folder in json.loads(sys.argv[1]) if folder not in sys.path]; sys.path += "
    "more; "
    "run_id, *args = sys.argv[2:]; from helmsman._process.driver_watch import "
    "watch_driver; "
    "watch_driver(int(args[2]), run_id, channel=int(args[1])); "
    "from helmsman.rpc_server._ray_forks.forkserver import main; main(more, args)"
)
_END_S = 2.0


class RayForks:
    """A running fork server.

    Args:
        run_id: The run.
        log_path: File for its own output.
        preload: Modules that it imports before it forks workers.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, run_id: str, log_path: Path, preload: Sequence[str]) -> None:
        import ray._private.workers

        self._workers = Path(ray._private.workers.__path__[0])
        self._key = secrets.token_hex(16)
        self._name = f"helmsman-{run_id}-{secrets.token_hex(4)}"
        self._control, theirs = socket.socketpair()
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
            theirs,
            pidfd_of_this_process() as driver,
            os.fdopen(open_log(log_path, run_id), "ab") as output,
        ):
            # In the kernel's abstract namespace, so no file must be removed.
            listener.bind(f"\0{self._name}")
            listener.listen(1024)  # before it serves, so that early clients are not refused
            fds = listener.fileno(), theirs.fileno(), driver
            # Its own process group protects it from the terminal's Ctrl-C. It shares the raylet's
            # session, as its workers do.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _BOOTSTRAP,
                    json.dumps(absolute_search_path()),
                    run_id,
                    *map(str, fds),
                    str(self._workers / "default_worker.py"),
                    ",".join(preload),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=fds,
                env=os.environ
                # With the raylet's tag, the raylet's guardian would end it.
                | {TAG_VARIABLE: f"{run_id}/forkserver"},
                process_group=0,
            )

    def serving_the_raylet(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, a raylet that this thread starts has its Python workers forked."""
        from ray._private import services

        return replaced(services, start_ray_process=self._start_process)

    def _start_process(
        self, start: Any, command: list[str], process_type: str, *args: Any, **kwargs: Any
    ) -> Any:
        changed = (
            through_client(command, self._workers) if process_type == "raylet" else list(command)
        )
        if process_type != "raylet" or changed is None:
            if changed is None:
                log.info(
                    "the command by which this version of Ray starts its workers is not known; "
                    "they are not forked"
                )
                self._control.close()
            return start(command, process_type, *args, **kwargs)
        address = {ray_fork_client.ADDRESS_VARIABLE.decode(): f"{self._key}:{self._name}"}
        updates = kwargs.pop("env_updates", None) or {}
        process = start(changed, process_type, *args, env_updates={**updates, **address}, **kwargs)
        self._begin({**os.environ, **updates}, process.process.pid)
        return process

    def _begin(self, environment: dict[str, str], raylet: int) -> None:
        """Send the environment of the raylet's workers; the fork server then imports Ray."""
        given = {**environment, "RAY_RAYLET_PID": str(raylet), "RAY_JOB_ID": "ffffffff"}
        with contextlib.suppress(OSError):  # it has exited: clients fall back to a normal start
            self._control.sendall(json.dumps([self._key, given]).encode() + b"\n")

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # it has exited
            # Takes effect even if forked children of this process hold a copy.
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_running: list[RayForks] = []
"""The fork server of this process's embedded Ray; at most one."""


def forked_workers(
    run_id: str, log_path: Path, preload: Sequence[str] | None
) -> contextlib.AbstractContextManager[None]:
    """Within the block, this thread starts a Ray whose Python workers are forked.

    Forking lasts until end_forks(). On systems other than Linux nothing is forked.

    Args:
        run_id: The run.
        log_path: File for the fork server's own output.
        preload: Modules that the fork server imports; None switches forking off.
    """
    if preload is None or sys.platform != "linux":
        return contextlib.nullcontext()
    try:
        forks = RayForks(run_id, log_path, preload)
    except OSError as error:
        log.info("no fork server could be started: %s; Ray starts each worker itself", error)
        return contextlib.nullcontext()
    _running.append(forks)
    return forks.serving_the_raylet()


def are_workers_forked() -> bool:
    """Return whether this process's embedded Ray forks its workers."""
    return bool(_running)


def end_forks() -> None:
    while _running:
        _running.pop().stop()
