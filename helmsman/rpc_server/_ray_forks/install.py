"""The driver's end of the fork server of an embedded Ray: starts it, and has the raylet start its
workers through it.

``forked_workers`` is the one entry point, and its argument ``preload`` the switch. The changes to
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

from helmsman.rpc_server._process.driver_watch import pidfd_of_this_process
from helmsman.rpc_server._process.environment import absolute_search_path
from helmsman.rpc_server._process.guardian import TAG_VARIABLE
from helmsman.rpc_server._process.safe_files import open_log
from helmsman.rpc_server._ray_forks import client as ray_fork_client
from helmsman.rpc_server._ray_forks.ray_patches import replaced, through_client

log = logging.getLogger(__name__)

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = filter(None, sys.path); "
    "more = [folder for folder in json.loads(sys.argv[1]) if folder not in sys.path]; sys.path += "
    "more; "
    "run_id, *args = sys.argv[2:]; from helmsman.rpc_server._process.driver_watch import "
    "watch_driver; "
    "watch_driver(int(args[2]), run_id, channel=int(args[1])); "
    "from helmsman.rpc_server._ray_forks.forkserver import main; main(more, args)"
)
_END_S = 2.0


class RayForks:
    """A fork server that has been started, for a run, with its own output going to ``log_path``.
    Raises: OSError.
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
            # in the kernel's abstract namespace, where nothing has to be removed
            listener.bind(f"\0{self._name}")
            listener.listen(1024)  # before it serves, so that nobody is turned away who comes early
            fds = listener.fileno(), theirs.fileno(), driver
            # A process group of its own keeps the terminal's Ctrl-C away; the session is the
            # raylet's, as its workers' is.
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
                # the raylet's guardian ends what has the raylet's
                | {TAG_VARIABLE: f"{run_id}/forkserver"},
                process_group=0,
            )

    def serving_the_raylet(self) -> contextlib.AbstractContextManager[None]:
        """A raylet that this thread starts within the block has its Python workers forked."""
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
                    "this Ray starts its workers in a way that is not known here; they are not "
                    "forked"
                )
                self._control.close()
            return start(command, process_type, *args, **kwargs)
        address = {ray_fork_client.ADDRESS_VARIABLE.decode(): f"{self._key}:{self._name}"}
        updates = kwargs.pop("env_updates", None) or {}
        process = start(changed, process_type, *args, env_updates={**updates, **address}, **kwargs)
        self._begin({**os.environ, **updates}, process.process.pid)
        return process

    def _begin(self, environment: dict[str, str], raylet: int) -> None:
        """Let it import Ray, as the workers of this raylet would."""
        given = {**environment, "RAY_RAYLET_PID": str(raylet), "RAY_JOB_ID": "ffffffff"}
        with contextlib.suppress(OSError):  # it has died: clients find nobody, and start without it
            self._control.sendall(json.dumps([self._key, given]).encode() + b"\n")

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # it has exited
            # also for children that this process has forked and that hold a copy
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_running: list[RayForks] = []
"""The fork server of the embedded Ray of this process, which has one at most."""


def forked_workers(
    run_id: str, log_path: Path, preload: Sequence[str] | None
) -> contextlib.AbstractContextManager[None]:
    """Within it, this thread starts a Ray whose Python workers are forked with the modules
    ``preload``, until end_forks(). None switches forking off, and so does a system other than
    Linux.
    """
    if preload is None or sys.platform != "linux":
        return contextlib.nullcontext()
    try:
        forks = RayForks(run_id, log_path, preload)
    except OSError as error:
        log.info("Ray starts its workers by itself, as no fork server could be started: %s", error)
        return contextlib.nullcontext()
    _running.append(forks)
    return forks.serving_the_raylet()


def end_forks() -> None:
    while _running:
        _running.pop().stop()
