"""Ray's processes on this node: started by ``ray start``, watched, and ended with all that they have started.

``ray stop`` is never used: it ends processes by their names, also those of other runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from helmsman.api.errors import BootstrapError, BootstrapExit
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._bootstrap.async_utils import Tell
from helmsman.controller._ray_backend.ray_logs import last_warnings, newest_session_logs
from helmsman.controller._ray_backend.start_limits import CORE
from helmsman.controller._transport.base import describe_exit, split_returncode, tail_of
from helmsman.rpc_server._process.guardian import TAG_VARIABLE, descendants, end_family, family, process_table, wait_until

_STARTED = "Ray runtime started."
_POLL_S = 0.05
_END_S = 2.0
"""How long Ray may take to end in order."""
_LOOK_S = 1.0


class RayProcess:
    """``ray start --block`` as a child, and what it has started.

    Args:
        command: what to run.
        environ: its environment.
        tag: by which all that it starts is recognised.
        log_path: for what it prints.
        start_s: seconds that it may take to start.
        tell: prints news.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], tag: str, log_path: Path, start_s: float, tell: Tell
    ) -> None:
        self._command, self._environ = list(command), {**environ, TAG_VARIABLE: tag}
        self._tag, self._log_path, self._start_s, self._tell = tag, log_path, start_s, tell
        self._watched: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pidfds: list[int] = []

    async def start(self) -> None:
        """Start it, and wait until it prints that Ray is up; a start that fails within its time is tried once more.

        Raises:
            BootstrapError: with the end of what it printed, and the warnings and errors in the logs of Ray's processes.
        """
        deadline = Deadline(self._start_s)
        try:
            await self._start(deadline)
        except BootstrapError as error:
            if deadline.passed:
                raise
            self._tell(f"{error}\nRay is started once more (after {deadline.elapsed_s:.1f} s of at most {self._start_s:g} s)")
            await self.stop()
            self._ended = asyncio.get_running_loop().create_future()
            await self._start(deadline)

    async def _start(self, deadline: Deadline) -> None:
        with self._log_path.open("wb") as log:
            # Not in a thread: a start that is cancelled must know the process that it has to end.
            self._process = subprocess.Popen(  # noqa: ASYNC220 - a few milliseconds, once in a run
                self._command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C is for the script
            )
        self._watch(self._process.pid, "ray start")
        looked_at = time.monotonic()
        while _STARTED not in self._log_path.read_text(errors="replace"):
            if self._ended.done():
                raise self._not_started(f": {self._ended.result()}")
            if deadline.passed:
                raise self._not_started(
                    f" within {self._start_s:g} s; where the node is only busy, give more with --start-timeout"
                )
            if time.monotonic() - looked_at > _LOOK_S:  # Ray itself goes on waiting for a raylet that has exited
                self._watch_members()
                looked_at = time.monotonic()
            await asyncio.sleep(_POLL_S)
        self._watch_members()

    def _not_started(self, why: str) -> BootstrapError:
        return BootstrapError(f"Ray did not start on this node{why}", exit_code=BootstrapExit.RAY_DIED, log=self._log())

    def _log(self) -> str:
        """The end of what ``ray start`` printed, and the last warnings and errors of the processes that it has started."""
        logs = newest_session_logs(self._log_path.parent / "ray", "session_2*")
        return "\n".join([tail_of(str(self._log_path)), *(last_warnings(logs) if logs else ())])

    def _watch_members(self) -> None:
        for pid, name in self._members():
            if pid not in self._watched:
                self._watched.add(pid)
                self._watch(pid, name)

    def _members(self) -> list[tuple[int, str]]:
        """Pids and names of the processes without which the node is none; also of those that ``ray start`` has not reaped."""
        assert self._process is not None
        found = []
        for pid in family(self._process.pid, self._tag) | descendants(self._process.pid, process_table()):
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name in CORE:
                    found.append((pid, name))
        return found

    def _watch(self, pid: int, name: str) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._has_ended(name, None)
            return
        self._pidfds.append(pidfd)
        asyncio.get_running_loop().add_reader(pidfd, self._has_ended, name, pidfd)

    def _has_ended(self, name: str, pidfd: int | None) -> None:
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            self._pidfds.remove(pidfd)
            os.close(pidfd)
        code = self._process.poll() if name == "ray start" and self._process is not None else None
        how = "has ended" if code is None else describe_exit(*split_returncode(code))
        if not self._ended.done():
            self._ended.set_result(f"{name} {how}")

    async def ended(self) -> str:
        """Wait until a process without which the node is none has ended; returns which."""
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """End all of it: the raylet in order, so that its head knows, and the rest, which keeps nothing, by force."""
        if self._process is None:
            return
        await asyncio.to_thread(self._finish, self._process)
        while self._pidfds:
            pidfd = self._pidfds.pop()
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        raylets = {pid for pid, name in self._members() if name == "raylet"}
        for pid in raylets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not raylets & family(process.pid, self._tag), _END_S, _POLL_S)
        process.kill()
        end_family(process.pid, self._tag)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, which alone can end it
            process.wait(_END_S)
