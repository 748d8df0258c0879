"""The driver's end of the fork server of an embedded Ray: starts it, and has the raylet start its workers through it.

How a raylet starts workers is private to Ray. It is changed here alone, in the raylet's command; where that does not look as
expected, it stays as it is, and every worker starts by itself.
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
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from helmsman.rpc_server._process.driver_watch import pidfd_of_this_process
from helmsman.rpc_server._process.environment import absolute_search_path
from helmsman.rpc_server._process.guardian import TAG_VARIABLE
from helmsman.rpc_server._process.safe_files import open_log
from helmsman.rpc_server._ray_forks import client as ray_fork_client

log = logging.getLogger(__name__)

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = filter(None, sys.path); "
    "more = [folder for folder in json.loads(sys.argv[1]) if folder not in sys.path]; sys.path += more; "
    "run_id, *args = sys.argv[2:]; from helmsman.rpc_server._process.driver_watch import watch_driver; "
    "watch_driver(int(args[2]), run_id, channel=int(args[1])); "
    "from helmsman.rpc_server._ray_forks.forkserver import main; main(more, args)"
)
_COMMAND_OPTION = "--python_worker_command="
_END_S = 2.0


class RayForks:
    """A fork server that has been started.

    Args:
        run_id: which its process and its socket bear.
        log_path: where its own output goes.
        preload: modules that it imports before it forks.
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
            listener.bind(f"\0{self._name}")  # in the kernel's abstract namespace, where nothing has to be removed
            listener.listen(1024)  # before it serves, so that nobody is turned away who comes early
            fds = listener.fileno(), theirs.fileno(), driver
            # A process group of its own keeps the terminal's Ctrl-C away; the session is the raylet's, as its workers' is.
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
                env=os.environ | {TAG_VARIABLE: f"{run_id}/forkserver"},  # the raylet's guardian ends what has the raylet's
                process_group=0,
            )

    @contextlib.contextmanager
    def serving_the_raylet(self) -> Iterator[None]:
        """A raylet that this thread starts within the block has its Python workers forked."""
        from ray._private import services

        start: Any = services.start_ray_process
        thread = threading.get_ident()

        def start_ray_process(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
            if process_type != "raylet" or threading.get_ident() != thread:
                return start(command, process_type, *args, **kwargs)
            changed = _through_client(command, self._workers)
            if changed is None:
                log.info("this Ray starts its workers in a way that is not known here; they are not forked")
                self._control.close()
                return start(command, process_type, *args, **kwargs)
            address = {ray_fork_client.ADDRESS_VARIABLE.decode(): f"{self._key}:{self._name}"}
            updates = kwargs.pop("env_updates", None) or {}
            process = start(changed, process_type, *args, env_updates={**updates, **address}, **kwargs)
            self._begin({**os.environ, **updates}, process.process.pid)
            return process

        services.start_ray_process = start_ray_process
        try:
            yield
        finally:
            services.start_ray_process = start

    def _begin(self, environment: dict[str, str], raylet: int) -> None:
        """Let it import Ray, as the workers of this raylet would."""
        given = {**environment, "RAY_RAYLET_PID": str(raylet), "RAY_JOB_ID": "ffffffff"}
        with contextlib.suppress(OSError):  # it has died: clients find nobody, and start without it
            self._control.sendall(json.dumps([self._key, given]).encode() + b"\n")

    def stop(self) -> None:
        """End it, and the workers that are left; returns when it has exited."""
        with contextlib.suppress(OSError):  # it has exited
            self._control.shutdown(socket.SHUT_RDWR)  # also for children that this process has forked and that hold a copy
        self._control.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _through_client(command: Sequence[str], workers: Path) -> list[str] | None:
    """A raylet's command whose Python workers are started through our client; None where it is not as expected.

    Args:
        workers: folder of Ray's programs for workers.
    """
    programs = [str(workers / "setup_worker.py"), str(workers / "default_worker.py")]
    expected = _COMMAND_OPTION + subprocess.list2cmdline([sys.executable, *programs]) + " "
    ours = _COMMAND_OPTION + subprocess.list2cmdline([sys.executable, "-I", "-S", ray_fork_client.__file__, *programs]) + " "
    changed = [ours + word.removeprefix(expected) if word.startswith(expected) else word for word in command]
    return changed if changed != list(command) else None
