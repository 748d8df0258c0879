"""The embedded Ray of this process: watched from its start, so that every wait for it fails as soon as it has ended."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import subprocess
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from helmsman.api.errors import ClusterLostError
from helmsman.controller._ray_backend.ray_logs import newest_log, tail_without_dumps
from helmsman.controller._transport.base import describe_exit, split_returncode
from helmsman.rpc_server._process.oom import oom_count, oom_kills_since

T = TypeVar("T")

log = logging.getLogger(__name__)

_REAP_S = 1.0


class EmbeddedRay:
    """An embedded Ray that has started. Its methods run on the event loop, except ``hold``.

    Args:
        processes: its processes by name, for those in CORE.
        logs: the folder of their logs.
        tear_down: calls unwatch, disconnects this process from Ray and ends what is left of it; run once. Its arguments are a
            limit in seconds, and whether to keep the directory of Ray's session.
    """

    def __init__(
        self,
        processes: Mapping[str, subprocess.Popen[bytes]],
        logs: Path,
        tear_down: Callable[[float, bool], Coroutine[Any, Any, None]],
    ) -> None:
        self._logs = logs
        self._tear_down = tear_down
        self._ending: asyncio.Task[None] | None = None
        self._error: dict[str, Any] | None = None
        """The fields of the ClusterLostError, once it is lost."""
        self._oom = oom_count()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._pidfds: dict[int, str] = {}
        if hasattr(os, "pidfd_open"):  # on other systems than Linux, only Ray's own errors report its end
            for name, process in processes.items():
                self._watch(name, process)

    # --- its end ----------------------------------------------------------------------------------------------------

    def _watch(self, name: str, process: subprocess.Popen[bytes]) -> None:
        pidfd = os.pidfd_open(process.pid)
        self._pidfds[pidfd] = name
        asyncio.get_running_loop().add_reader(pidfd, self._has_ended, name, process)

    async def unwatch(self) -> None:
        """Stop watching its processes, since they are about to be ended."""
        self._stop_watching()

    def _stop_watching(self) -> None:
        while self._pidfds:
            pidfd, _ = self._pidfds.popitem()
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def _has_ended(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self._stop_watching()
        with contextlib.suppress(subprocess.TimeoutExpired):  # another thread reaps it just now
            process.wait(_REAP_S)
        code, number = split_returncode(process.returncode)
        log_path = newest_log(self._logs, name)
        how = describe_exit(code, number, oom_kills_since(self._oom))
        self._error = {
            "cause": f"{name} (pid {process.pid}) {how}",
            "exit_code": code,
            "exit_signal": number,
            "log_path": log_path,
            "log_tail": tail_without_dumps(log_path),
        }
        log.error("%s", str(self.loss).split("\n", 1)[0])
        for waiting in list(self._waiting):
            waiting.cancel()
        for call in list(self._calls):
            self._fail(call)
        # At once: until this process is disconnected, its next use of the raylet's object store would end it.
        self._begin_end()

    @property
    def loss(self) -> ClusterLostError | None:
        """How it was lost; None while it is there, and when it was ended in order."""
        return None if self._error is None else ClusterLostError(**self._error)

    def require(self) -> None:
        """Raise ClusterLostError if it is lost."""
        if self._error is not None:
            raise ClusterLostError(**self._error)

    async def end(self, limit_s: float, *, keep_session: bool) -> None:
        """End it, and wait for that. Idempotent.

        Args:
            limit_s: seconds for Ray to shut down in order; this waits at most twice as long.
            keep_session: keep the directory of its session with its logs.
        """
        ending = self._begin_end(limit_s, keep_session)
        await asyncio.wait([ending], timeout=2 * limit_s)
        if ending.done():
            ending.result()

    def _begin_end(self, limit_s: float = 4.0, keep_session: bool = True) -> asyncio.Task[None]:
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._tear_down(limit_s, keep_session))
        return self._ending

    # --- what waits for it ------------------------------------------------------------------------------------------

    async def wait(self, answer: Awaitable[T]) -> T:
        """Await an answer of this Ray's. Raises ClusterLostError as soon as it is lost."""
        waiting: asyncio.Future[T] = asyncio.ensure_future(answer)
        self._waiting.add(waiting)
        try:
            if self._error is not None:
                waiting.cancel()
            return await waiting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._error is None or (task is not None and task.cancelling()):
                raise
            raise ClusterLostError(**self._error) from None
        finally:
            self._waiting.discard(waiting)

    def hold(self, call: concurrent.futures.Future[Any]) -> None:
        """Let a blocking call fail with ClusterLostError as soon as this Ray is lost, or at once."""
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        if self._error is not None:
            self._fail(call)

    def _fail(self, call: concurrent.futures.Future[Any]) -> None:
        assert self._error is not None
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it has ended just now
            call.set_exception(ClusterLostError(**self._error))
