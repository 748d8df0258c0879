"""The Ray to which this process is connected: calls that fail as soon as it is lost, and its end in
bounded time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
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

from helmsman.api.errors import ClusterLostError, RayStartError
from helmsman.api.extras import needed_by
from helmsman.api.forms import begin_in_thread
from helmsman.controller._aio.event_loop import run_sync
from helmsman.controller._node.run_registry import RUN_LABEL, RUN_VARIABLE
from helmsman.controller._transport.base import describe_exit, split_returncode, tail_of
from helmsman.rpc_server._process.oom import oom_count, oom_kills_since
from helmsman.rpc_server._process.safe_files import remove_tree
from helmsman.rpc_server._ray_forks.install import end_forks
from helmsman.rpc_server._ray_forks.ray_patches import forbid_auto_start

T = TypeVar("T")

log = logging.getLogger(__name__)

_END_S = 4.0
"""How long a lost Ray may take to shut down."""
_KILL_S = 5.0
_REAP_S = 1.0


class EmbeddedRay:
    """An embedded Ray that has started, watched from its start. Its methods run on the event loop.

    ``processes`` are those in CORE by name, and ``logs`` is the folder of their logs.
    """

    def __init__(self, processes: Mapping[str, subprocess.Popen[bytes]], logs: Path) -> None:
        self._logs = logs
        self._ending: asyncio.Task[None] | None = None
        self._error: dict[str, Any] | None = None
        """The fields of the ClusterLostError, once it is lost."""
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
        """Stop watching its processes, since they are about to be ended."""
        while self._pidfds:
            pidfd = self._pidfds.pop()
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def _has_ended(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.unwatch()
        with contextlib.suppress(subprocess.TimeoutExpired):  # another thread reaps it just now
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
        # At once: until this process is disconnected, its next use of the raylet's object store
        # would end it.
        self._begin_end(_END_S, keep_session=True)

    @property
    def loss(self) -> ClusterLostError | None:
        """How it was lost; None while it is there, and when it was ended in order."""
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


_current: EmbeddedRay | None = None
"""The embedded Ray that this process started last; a process has one at a time."""
_shutdowns: set[concurrent.futures.Future[None]] = set()
"""Calls that end a Ray and have not returned."""


def remember(ray: EmbeddedRay | None) -> None:
    """Note the embedded Ray that this process is connected to from now on; None for another
    cluster.
    """
    global _current
    _current = ray


def current() -> EmbeddedRay | None:
    """The embedded Ray that this process is connected to, or has lost."""
    return _current


# --- calls of Ray ---------------------------------------------------------------------------------


async def bounded(function: Callable[..., T], *arguments: Any, limit_s: float | None = None) -> T:
    """Run a blocking call of Ray's in a daemon thread, for at most ``limit_s`` seconds; None for
    calls that end by themselves while the cluster is there.

    Not in the loop's executor: such a call may hang for ever when the cluster's head has ended, and
    the interpreter waits at its exit for the threads of executors. At that exit itself it runs on
    the loop, unbounded, since no thread can start then.

    Raises: TimeoutError; ClusterLostError as soon as the embedded Ray is lost.
    """
    if _current is not None:
        _current.require()
    if not threading.main_thread().is_alive():
        return function(*arguments)
    call = begin_in_thread(function, *arguments, name="helmsman-ray")
    return await asyncio.wait_for(answered(asyncio.wrap_future(call)), limit_s)


def blocking(function: Callable[..., T], *arguments: Any) -> T:
    """As bounded, for a thread that waits."""
    return function(*arguments) if _current is None else run_sync(bounded(function, *arguments))


async def answered(answer: Awaitable[T]) -> T:
    """Await an answer of Ray's. Raises ClusterLostError as soon as the embedded Ray is lost."""
    return await (answer if _current is None else _current.wait(answer))


# --- its end --------------------------------------------------------------------------------------


def settle(limit_s: float) -> None:
    """Disconnect this process from an embedded Ray that is lost, and wait until none is being
    ended: that call would end the next one, too. Raises RayStartError after ``limit_s`` seconds.
    """
    if _current is not None and _current.loss is not None:
        run_sync(_current.end(_END_S, keep_session=True))
    if concurrent.futures.wait(list(_shutdowns), limit_s).not_done:
        reason = f"an earlier Ray of this process did not shut down within {limit_s:g} s"
        raise RayStartError(reason=reason, processes=[], log_path="", log_tail="")


def script_is_failing() -> bool:
    """Whether an exception is on its way through this thread, or has ended the script."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


async def end_connection(ray: EmbeddedRay | None, limit_s: float, *, keep_session: bool) -> None:
    """End an embedded Ray; None disconnects this process from another cluster. For the arguments
    see disconnect.
    """
    await (
        disconnect(limit_s, keep_session=keep_session)
        if ray is None
        else ray.end(limit_s, keep_session=keep_session)
    )


async def disconnect(limit_s: float, *, keep_session: bool) -> None:
    """Disconnect from Ray. An embedded one ends; its processes are killed if that takes longer than
    a limit.

    Args:
        limit_s: seconds for Ray to shut down in order.
        keep_session: keep the directory of Ray's session with its logs, as for a run that fails.
            One that did not shut down in order is kept in any case.
    """
    import ray
    from ray._private import worker

    if not ray.is_initialized():
        end_forks()
        return
    # private, as there is no public way to end the processes that ray.init started
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
    """Run a call that ends Ray in a daemon thread, as bounded does; it also runs when the embedded
    Ray is lost.
    """
    if threading.main_thread().is_alive():
        await asyncio.wait_for(asyncio.wrap_future(begin_shutdown(function)), limit_s)
    else:
        function()


def begin_shutdown(function: Callable[[], None]) -> concurrent.futures.Future[None]:
    """Run a call that ends Ray in a daemon thread; the next Ray of this process is started when it
    has returned.
    """
    call = begin_in_thread(function, name="helmsman-ray")
    _shutdowns.add(call)
    call.add_done_callback(_shutdowns.discard)
    return call


def _own_session(node: Any) -> Path | None:
    """The directory of the session that this process has started; None where it has joined
    another's.
    """
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
        log.info("the directory of Ray's session stays: %s", error)


# --- its nodes ------------------------------------------------------------------------------------


def has_started_its_cluster() -> bool:
    """Whether the cluster to which this process is connected was started here, and ends with this
    process.
    """
    from ray._private import worker

    node: Any = worker._global_node  # private, as there is no public way to know
    return node is not None and bool(node.is_head())


def is_own_node(node_id: str) -> bool:
    """Whether a node belongs to this run: to the cluster that this process, or ``helmsman up``, has
    started for it.
    """
    if has_started_its_cluster():
        return True
    import ray

    run_id = os.environ.get(RUN_VARIABLE)
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return bool(run_id) and any(
        node["NodeID"] == node_id and node["Labels"].get(RUN_LABEL) == run_id for node in nodes
    )


@contextlib.contextmanager
def importing_ray(user: str) -> Iterator[None]:
    """Import ray within it. Raises BackendNotInstalledError, which names the ``user`` of Ray.

    Authentication is explicit: without these variables, a local start writes a token file that
    changes the mode of this user's later clusters. An embedded cluster gets a token of its own, so
    that no other user can join it.

    The death of the raylet must not end this process. Ray ends a process whose raylet does not
    answer and has exited, and reads the raylet's pid from RAY_RAYLET_PID. A script has no such
    variable; Ray then takes the script's parent for the raylet, and counts it as exited where that
    is the init process, as in containers and services. The script's own pid always exists.
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
"""Logs of Ray's processes, in the order in which they start."""
_IS_WARNING = re.compile(r"\[?[-\d]+ [\d:,]+[ \t]+([WECF] \d|WARNING|ERROR|CRITICAL)")
_MOST_WARNINGS = 3
"""Lines of each log that are shown."""


def newest_session_logs(folder: Path, pattern: str) -> Path | None:
    """The folder of logs of the newest session below Ray's temporary folder, of a name that fits
    the pattern.
    """
    sessions = sorted(folder.glob(f"{pattern}/logs"), key=lambda path: path.stat().st_mtime)
    return sessions[-1] if sessions else None


def newest_log(folder: Path, name: str) -> str:
    """The log of a process of Ray's that is not empty, its errors first; else the folder."""
    written = [
        path
        for suffix in ("err", "out")
        if (path := folder / f"{name}.{suffix}").is_file() and path.stat().st_size
    ]
    return str(written[0] if written else folder)


def tail_without_dumps(path: str, num_lines: int = 20) -> str:
    """The last lines of a log of Ray's, without the tables of its state that it writes there every
    minute.
    """
    lines = [
        line
        for line in tail_of(path, 500).split("\n")
        if "[state-dump]" not in line and line.strip()
    ]
    return "\n".join(lines[-num_lines:])


def last_warnings(folder: Path) -> list[str]:
    """The last warnings and errors in the logs of a session, each once, with the name of its
    log.
    """
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
