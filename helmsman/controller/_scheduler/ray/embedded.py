"""This process's connection to Ray: a call raises when it is lost, and a shutdown has a limit."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from helmsman._base.event_loop import run_sync
from helmsman._process.oom import oom_count, oom_kills_since
from helmsman._process.safe_files import remove_tree
from helmsman._process.upkeep import Folder
from helmsman.api.errors import ClusterLostError, RayStartError
from helmsman.api.extras import needed_by
from helmsman.api.forms import begin_in_thread
from helmsman.controller._scheduler.transport.base import describe_exit, split_returncode, tail_of
from helmsman.rpc_server._ray_forks.install import end_forks
from helmsman.rpc_server._ray_forks.ray_patches import forbid_auto_start

T = TypeVar("T")

log = logging.getLogger(__name__)

_END_S = 4.0
"""Limit for a lost Ray to shut down."""
_KILL_S = 5.0
_REAP_S = 1.0


class EmbeddedRay:
    """A started embedded Ray, whose processes are watched. Its methods run on the event loop.

    ``processes`` has the keys gcs_server and raylet; ``logs`` is the folder of their logs.
    """

    def __init__(self, processes: Mapping[str, subprocess.Popen[bytes]], logs: Path) -> None:
        self._logs = logs
        self.session = Folder(logs.parent, with_files=True)
        """Ray's folder of sockets and logs."""
        self._ending: asyncio.Task[None] | None = None
        self._error: dict[str, Any] | None = None
        """Fields of the ClusterLostError once it is lost."""
        self._oom = oom_count()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._pidfds: set[int] = set()
        if hasattr(os, "pidfd_open"):
            # on other systems than Linux, only Ray's own errors report its end
            for name, process in processes.items():
                pidfd = os.pidfd_open(process.pid)
                self._pidfds.add(pidfd)
                asyncio.get_running_loop().add_reader(pidfd, self._has_ended, name, process)

    def unwatch(self) -> None:
        """Stop watching its processes, before they are ended."""
        self.session.close()
        while self._pidfds:
            pidfd = self._pidfds.pop()
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def _has_ended(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.unwatch()
        with contextlib.suppress(subprocess.TimeoutExpired):  # another thread is reaping it
            process.wait(_REAP_S)
        code, number = split_returncode(process.returncode)
        log_path = newest_log(self._logs, name)
        self._error = {
            "cause": f"{name} (pid {process.pid}) "
            f"{describe_exit(code, number, oom_kills_since(self._oom))}",
            "exit_code": code,
            "exit_signal": number,
            "log_path": log_path,
            "log_tail": tail_without_dumps(log_path),
        }
        log.error("%s", str(self.loss).split("\n", 1)[0])
        for waiting in list(self._waiting):
            waiting.cancel()
        # Disconnect at once: otherwise the next use of the raylet's object store would end this
        # process.
        self._begin_end(_END_S, keep_session=True)

    @property
    def removal(self) -> str:
        """Why it cannot start workers, if its folder of sockets was removed; else ''."""
        folder = self._logs.parent
        if (folder / "sockets" / "raylet").exists():
            return ""
        return (
            f"Ray's session folder {folder} was removed, expected its sockets: cleaners of "
            "temporary files remove old files. Workers that run are not affected. Start the script "
            "again, with RAY_TMPDIR at a folder that is not cleaned"
        )

    @property
    def loss(self) -> ClusterLostError | None:
        """The error of a lost cluster; None while it runs and after an orderly end."""
        return None if self._error is None else ClusterLostError(**self._error)

    def require(self) -> None:
        if (loss := self.loss) is not None:
            raise loss

    async def end(self, limit_s: float, *, keep_session: bool) -> None:
        """End it and wait, at most twice ``limit_s``; see disconnect. Idempotent."""
        ending = self._begin_end(limit_s, keep_session=keep_session)
        await asyncio.wait([ending], timeout=2 * limit_s)
        if ending.done():
            ending.result()

    def _begin_end(self, limit_s: float, *, keep_session: bool) -> asyncio.Task[None]:
        if self._ending is None:
            self.unwatch()
            self._ending = asyncio.get_running_loop().create_task(
                disconnect(limit_s, keep_session=keep_session)
            )
        return self._ending

    async def wait(self, answer: Awaitable[T]) -> T:
        """Await a reply of this Ray.

        Raises:
            ClusterLostError: It is lost; raised at once.
        """
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


_current: EmbeddedRay | None = None
"""The embedded Ray that this process started last; a process has one at a time."""
_shutdowns: set[concurrent.futures.Future[None]] = set()
"""Shutdown calls that have not returned."""
_kept: list[object] = []
"""References of Ray whose release waits for a shutdown; see keeping."""


def remember(ray: EmbeddedRay | None) -> None:
    """Set the embedded Ray that this process is connected to; None for another cluster."""
    global _current
    _current = ray


def current() -> EmbeddedRay | None:
    """The embedded Ray that this process is connected to, or has lost."""
    return _current


# --- calls of Ray ---------------------------------------------------------------------------------


async def bounded(function: Callable[..., T], *arguments: Any, limit_s: float | None = None) -> T:
    """Run a blocking Ray call in a daemon thread, for at most ``limit_s`` seconds.

    None suits calls that return by themselves while the cluster runs. The loop's executor is not
    used: such a call may hang forever once the head has ended, and the interpreter waits for
    executor threads when it exits. While the interpreter exits, no thread can start, so the call
    runs on the loop, without a limit.

    Raises:
        TimeoutError: The limit has passed.
        ClusterLostError: The embedded Ray is lost; raised at once.
    """
    if _current is not None:
        _current.require()
    if not threading.main_thread().is_alive():
        return function(*arguments)
    call = begin_in_thread(function, *arguments, name="helmsman-ray")
    return await asyncio.wait_for(answered(asyncio.wrap_future(call)), limit_s)


def blocking(function: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking Ray call and wait for it in this thread.

    Raises:
        ClusterLostError: The embedded Ray is lost; raised at once.
    """
    return function(*arguments) if _current is None else run_sync(bounded(function, *arguments))


async def answered(answer: Awaitable[T]) -> T:
    """Await a reply of Ray.

    Raises:
        ClusterLostError: The embedded Ray is lost; raised at once.
    """
    return await (answer if _current is None else _current.wait(answer))


# --- shutdown -------------------------------------------------------------------------------------


def settle(limit_s: float) -> None:
    """Disconnect from a lost embedded Ray and wait for shutdowns in progress.

    A shutdown call that returns later would also end the next Ray.

    Raises:
        RayStartError: A shutdown did not finish within ``limit_s`` seconds.
    """
    if _current is not None and _current.loss is not None:
        run_sync(_current.end(_END_S, keep_session=True))
    if concurrent.futures.wait(list(_shutdowns), limit_s).not_done:
        reason = f"an earlier Ray of this process did not shut down within {limit_s:g} s"
        raise RayStartError(reason=reason, processes=[], log_path="", log_tail="")


async def end_connection(ray: EmbeddedRay | None, limit_s: float, *, keep_session: bool) -> None:
    """End an embedded Ray, or with None disconnect from another cluster; see disconnect."""
    await (
        disconnect(limit_s, keep_session=keep_session)
        if ray is None
        else ray.end(limit_s, keep_session=keep_session)
    )


async def disconnect(limit_s: float, *, keep_session: bool) -> None:
    """Disconnect from Ray; an embedded one ends, and its processes are killed after the limit.

    Args:
        limit_s: Seconds for Ray to shut down in order.
        keep_session: Keep the directory of Ray's session with its logs, as after a failed run. It
            is always kept if Ray did not shut down in order.
    """
    import ray
    from ray._private import worker

    if not ray.is_initialized():
        end_forks()
        return
    # private: there is no public way to end the processes that ray.init started
    node: Any = worker._global_node
    session = _own_session(node)
    try:
        await _alone(ray.shutdown, limit_s=limit_s)
    except TimeoutError:
        keep_session = True
        log.warning("Ray did not shut down within %g s; its processes are killed", limit_s)
        if node is not None:
            await _alone(
                lambda: node.kill_all_processes(check_alive=False, allow_graceful=False),
                limit_s=_KILL_S,
            )
    end_forks()
    if session is not None and not keep_session:
        _remove_session(session)


async def _alone(function: Callable[[], None], *, limit_s: float) -> None:
    """Run a shutdown call in a daemon thread; unlike bounded, also after Ray is lost."""
    if threading.main_thread().is_alive():
        await asyncio.wait_for(asyncio.wrap_future(begin_shutdown(function)), limit_s)
    else:
        function()


def begin_shutdown(function: Callable[[], None]) -> concurrent.futures.Future[None]:
    """Start a shutdown call in a daemon thread.

    This process starts its next Ray only after the call has returned.
    """
    # A cycle of objects with references, which the collector finds, must wait, too; see keeping.
    is_collecting = gc.isenabled()
    gc.disable()
    call = begin_in_thread(function, name="helmsman-ray")
    _shutdowns.add(call)

    def ended(call: concurrent.futures.Future[None]) -> None:
        if is_collecting:
            gc.enable()
        _kept.clear()
        _shutdowns.discard(call)

    call.add_done_callback(ended)
    return call


@contextlib.contextmanager
def keeping(reference: object) -> Iterator[None]:
    """Keep a reference of Ray beyond the block, until a shutdown in progress has returned.

    Ray ends the process, without a message, if a reference is released while another thread is
    inside of ``ray.shutdown``.
    """
    try:
        yield
    finally:
        if _shutdowns:
            _kept.append(reference)


def _own_session(node: Any) -> Path | None:
    """Directory of the session that this process started; None if it joined another one."""
    if node is None or not node.is_head():
        return None
    path = Path(node.get_session_dir_path())
    return path if re.fullmatch(rf"session_[0-9_-]+_{os.getpid()}", path.name) else None


def _remove_session(path: Path) -> None:
    latest = path.parent / "session_latest"
    with contextlib.suppress(OSError):  # Ray never replaces a dangling link
        if os.readlink(latest) == str(path):
            latest.unlink()
    try:
        remove_tree(path)
    except OSError as error:
        log.info("the directory of Ray's session was not removed: %s", error)


# --- nodes ----------------------------------------------------------------------------------------


def has_started_its_cluster() -> bool:
    """Whether this process started the cluster that it is connected to, which ends with it."""
    from ray._private import worker

    node: Any = worker._global_node  # private: there is no public way to find out
    return node is not None and bool(node.is_head())


@contextlib.contextmanager
def importing_ray(user: str) -> Iterator[None]:
    """Set up the environment for importing ray in the block.

    Authentication is explicit: without these variables a local start writes a token file, which
    changes the mode of this user's later clusters. An embedded cluster gets its own token, so that
    no other user can join it.

    The raylet's death must not end this process. Ray ends a process whose raylet does not answer
    and has exited, and reads the raylet's pid from RAY_RAYLET_PID. Scripts lack this variable, so
    Ray would take the script's parent for the raylet. It counts an init process as exited, which is
    the parent in containers and services. Therefore the variable is set to the script's own pid,
    which always exists.

    Raises:
        BackendNotInstalledError: Ray is not installed; the error names ``user``, which needs it.
    """
    variables = {}
    if "ray" not in sys.modules:
        if os.environ.get("RAY_ADDRESS", "local") == "local" and "RAY_AUTH_MODE" not in os.environ:
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        if "RAY_RAYLET_PID" not in os.environ:
            variables["RAY_RAYLET_PID"] = str(os.getpid())
    os.environ.update(variables)
    try:
        with needed_by(user, "ray"):
            yield
        forbid_auto_start()
    finally:
        for name in variables:
            del os.environ[name]


_LOGS = (
    "gcs_server.err",
    "gcs_server.out",
    "raylet.err",
    "raylet.out",
    "dashboard_agent.log",
    "runtime_env_agent.log",
)
"""Logs of Ray's processes, in the order of their start."""
_IS_WARNING = re.compile(r"\[?[-\d]+ [\d:,]+[ \t]+([WECF] \d|WARNING|ERROR|CRITICAL)")
_MOST_WARNINGS = 3
"""Most lines shown of each log."""


def newest_session_logs(folder: Path, pattern: str) -> Path | None:
    """Log folder of the newest session in Ray's temporary folder whose name matches ``pattern``."""
    sessions = sorted(folder.glob(f"{pattern}/logs"), key=lambda path: path.stat().st_mtime)
    return sessions[-1] if sessions else None


def newest_log(folder: Path, name: str) -> str:
    """Log of a Ray process that is not empty, stderr first; otherwise the folder."""
    written = [
        path
        for suffix in ("err", "out")
        if (path := folder / f"{name}.{suffix}").is_file() and path.stat().st_size
    ]
    return str(written[0] if written else folder)


def tail_without_dumps(path: str, num_lines: int = 20) -> str:
    """Last lines of a Ray log, without the state tables that Ray writes every minute."""
    lines = [
        line
        for line in tail_of(path, 500).split("\n")
        if "[state-dump]" not in line and line.strip()
    ]
    return "\n".join(lines[-num_lines:])


def last_warnings(folder: Path) -> list[str]:
    """Last warnings and errors in a session's logs, without duplicates; each names its log."""
    found, known = [], set[str]()
    for name in _LOGS:
        lines = [
            line
            for line in tail_of(str(folder / name), 1000).splitlines()
            if _IS_WARNING.match(line)
        ]
        found += [f"{name}: {line}" for line in lines if line not in known][-_MOST_WARNINGS:]
        known |= set(lines)
    return found
