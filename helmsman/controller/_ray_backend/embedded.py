"""The Ray that a RayScheduler starts for itself: how it is started, kept apart from the terminal, and ended in bounded time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from helmsman.api.errors import ClusterMismatchError, RayStartError
from helmsman.api.scheduler import Timeouts
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._aio.event_loop import run_sync, submit
from helmsman.controller._node.run_registry import RUN_LABEL, RUN_VARIABLE, make_log_dir
from helmsman.controller._ray_backend.process_watch import CORE, EmbeddedRay, newest_log, tail_without_dumps
from helmsman.controller._ray_backend.start_limits import RayStart
from helmsman.rpc_server._process import ray_exec
from helmsman.rpc_server._process.guardian import TAG_VARIABLE, descendants, guard, process_table
from helmsman.rpc_server._process.safe_files import remove_tree
from helmsman.rpc_server._ray_forks.install import RayForks

T = TypeVar("T")

log = logging.getLogger(__name__)

_INTERRUPTED_START_S = 15.0
"""How long a start that an interrupt has made pointless may still come to its own end. Ray cannot be broken off midway: without
its head, it waits for that half a minute, and the script for it."""
_END_S = 3.0
"""How long Ray may then take to shut down."""
_NEVER_S = 365 * 86_400
_ATTEMPTS = 2
"""Most attempts to start Ray. On a busy machine its processes may miss limits that cannot be changed."""


def choose_authentication() -> None:
    """Decide how an embedded cluster knows its own; before ray is imported, which is when Ray reads these variables.

    Always explicit: a local start without them writes a token file that changes what later clusters of this user demand. An
    embedded cluster gets a token of its own, so that no other user can join it.
    """
    is_embedded = os.environ.get("RAY_ADDRESS", "local") == "local"
    if "ray" not in sys.modules and is_embedded and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def outliving_the_raylet() -> Iterator[None]:
    """Import ray within it, so that the death of its raylet does not end this process.

    Ray ends a process whose raylet does not answer and has exited. It reads the raylet's pid from RAY_RAYLET_PID, once, when it
    is imported. A script has no such variable; Ray then takes the script's parent for the raylet, and counts it as exited
    where that is the init process, as in containers and services. The pid of the script itself has always a process.
    """
    if "ray" in sys.modules or "RAY_RAYLET_PID" in os.environ:
        yield
        return
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ["RAY_RAYLET_PID"]


def connect(
    address: str,
    run_id: str,
    sizes: dict[str, Any],
    log_dir: Path,
    preload: Sequence[str] | None,
    start_s: float = Timeouts().start_s,
) -> EmbeddedRay | None:
    """Join the cluster at ``address``, or start one of our own for 'local'.

    Args:
        address: of the cluster.
        run_id: of the run, in the names of what is started.
        sizes: what our own counts as its logical resources.
        log_dir: of the run.
        preload: modules that the workers of our own are forked with; None lets Ray start each by itself.
        start_s: seconds that our own may take to start.

    Returns: The embedded Ray; None for another cluster.

    Raises: RayStartError for an embedded Ray; the errors of ray.init for another cluster.
    """
    global _current

    _current = None
    if address != "local":
        _connect(address, run_id, sizes, log_dir, None, None)
        return None
    deadline = Deadline(start_s)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _current = _connect(address, run_id, sizes, log_dir, preload, deadline)
        except RayStartError as error:
            if attempt == _ATTEMPTS or deadline.passed:
                raise
            log.warning("Ray did not start and is started once more: %s", error.reason)
        else:
            break
    return _current


def _connect(
    address: str, run_id: str, sizes: dict[str, Any], log_dir: Path, preload: Sequence[str] | None, deadline: Deadline | None
) -> EmbeddedRay | None:
    import ray

    start = None if deadline is None else RayStart(deadline)
    if address == "local":
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # the script imported ray before us, which decided that
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        # As local workers have it. The default of 15 starves workers, and their guardians, beside anything else that runs.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_task_events_shutdown_flush_timeout_ms", "500")  # of 5 s, all spent when the head has ended

    async def init() -> EmbeddedRay | None:
        serving: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        patience: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        settings: dict[str, Any] = {}
        try:
            if address == "local":
                os.environ[TAG_VARIABLE] = f"{run_id}/ray"  # inherited by all of its processes, for helmsman clean
                # A client of Ray's head that waits and cannot reach it for so long ends the process, and one that blocks in a
                # call cannot be disconnected. The setting is for clients of the core worker, the other for those before it.
                settings["_system_config"] = {"gcs_rpc_server_reconnect_timeout_s": _NEVER_S}
                raylet: Any = ray._raylet
                raylet.Config.initialize(json.dumps({**settings["_system_config"], **RayStart.SETTINGS}).encode())
                if preload is not None and sys.platform == "linux":
                    serving = _forked_workers(run_id, log_dir, preload)
                if start is not None:
                    patience = start.watching()
            with serving, _spawning(), patience:
                ray.init(
                    address=address,
                    namespace=f"helmsman-{run_id}",
                    include_dashboard=False if address == "local" else None,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    **sizes,
                    **settings,
                )
            return _watched() if address == "local" else None
        finally:
            os.environ.pop(TAG_VARIABLE, None)

    others = descendants(os.getpid(), process_table())
    # On the loop's thread, which lives as long as the process: an embedded cluster ends with the thread that started it. And in
    # the script's own thread Ray would answer signals itself, and one that breaks in there ends the interpreter by a crash.
    starting = submit(init())
    try:
        started = starting.result()
        _require_own_run(address)
        if address == "local":
            _guard_raylet(f"{run_id}/ray")
        return started
    except BaseException as error:
        concurrent.futures.wait([starting], timeout=_INTERRUPTED_START_S)
        if starting.done() and starting.exception() is None and (unwanted := starting.result()) is not None:
            submit(unwanted.unwatch()).result()
        is_rays = isinstance(error, (RuntimeError, OSError)) or type(error) is Exception
        failure = _failed_start(error, start, others) if start is not None and is_rays else None
        _end_half_started(others)
        _end_forks()
        if failure is not None:
            raise failure from error
        raise
    finally:
        if threading.current_thread() is threading.main_thread() and (handler := signal.getsignal(signal.SIGTERM)) is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray has put its own below Python's, which prints a stack at every SIGTERM


def _watched() -> EmbeddedRay:
    """The Ray that this process has just started, under watch from here on."""
    from ray._private import worker

    node: Any = worker._global_node  # private, as there is no public way to know the processes that ray.init started
    processes = {name: each.process for name in CORE for each in node.all_processes.get(name, [])}
    return EmbeddedRay(processes, Path(node.get_logs_dir_path()), end_embedded_ray)


def _failed_start(error: BaseException, start: RayStart, others: set[int]) -> RayStartError:
    """The error of a failed start; called while its processes still exist.

    Args:
        error: of ray.init.
        start: whose processes ray.init has started.
        others: processes below this one that were there before.
    """
    table = process_table()
    started = sorted(descendants(os.getpid(), table) - others)
    described = [f"{_name_of(pid)} (pid {pid}, {_STATES.get(table[pid].state, table[pid].state)})" for pid in started]
    logs = _newest_logs()
    log_path = newest_log(logs, start.blamed) if logs else ""
    return RayStartError(
        reason=f"{type(error).__name__}: {error}",
        processes=described,
        log_path=log_path,
        log_tail=tail_without_dumps(log_path) if log_path else "",
    )


_STATES = {"R": "running", "S": "sleeping", "D": "waiting for the disk", "T": "stopped", "Z": "ended"}


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "a process that has ended"


def _newest_logs() -> Path | None:
    """The folder of logs of the newest of this process's sessions."""
    from ray._common import utils

    folder = utils.get_default_ray_temp_dir()  # type: ignore[no-untyped-call]
    sessions = sorted(Path(folder).glob(f"session_*_{os.getpid()}/logs"))
    return sessions[-1] if sessions else None


def _require_own_run(address: str) -> None:
    """Under ``helmsman up``: what was joined by RAY_ADDRESS must be the cluster that it has started. An earlier one, or that of
    another job, may have taken its port."""
    run_id = os.environ.get(RUN_VARIABLE)
    if not run_id or address != os.environ.get("RAY_ADDRESS"):
        return
    import ray

    runs = {str(node["Labels"].get(RUN_LABEL)) for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    if run_id not in runs:
        raise ClusterMismatchError(
            f"the cluster at {address} is not that of this run: its nodes belong to {', '.join(sorted(runs)) or 'none'}, and "
            f"this script was started on run {run_id} ({RUN_VARIABLE}). That cluster has most likely ended; start it again"
        )


_forks: list[RayForks] = []
"""The fork server of the embedded cluster, of which a process has one at most."""


def _forked_workers(run_id: str, log_dir: Path, preload: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Within it, a cluster is started whose workers are forked."""
    try:
        make_log_dir(log_dir, run_id)
        forks = RayForks(run_id, log_dir / "ray_forkserver.log", preload)
    except OSError as error:
        log.info("Ray starts its workers by itself, as no fork server could be started: %s", error)
        return contextlib.nullcontext()
    _forks.append(forks)
    return forks.serving_the_raylet()


def _end_forks() -> None:
    while _forks:
        _forks.pop().stop()


def _guard_raylet(tag: str) -> None:
    """See that the raylet's children go with it, as they should when the script is killed.

    Its agents notice by themselves, but first tell the head, and wait for it a minute or more where it has gone too (seen with
    Ray 2.60, about every second time).
    """
    from ray._private import worker

    node: Any = worker._global_node  # private, as there is no public way to know the processes that ray.init started
    for process in node.all_processes["raylet"]:
        guard(process.process.pid, tag)


def _end_half_started(others: set[int]) -> None:
    """End what a start has left, apart from the processes that were there before it.

    Ray ends its own, but not the raylet's children, which would stay for a minute or two.
    """
    import ray

    started = descendants(os.getpid(), process_table()) - others
    ending = threading.Thread(target=ray.shutdown, name="helmsman-ray", daemon=True)
    ending.start()
    ending.join(_END_S)
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _spawning() -> Iterator[None]:
    """What this thread starts of Ray within the block is spawned, and on Linux without a fork of the script; see ray_exec.

    Each gets a process group of its own: a signal to the script's group, such as a terminal's Ctrl-C, would otherwise end them
    under the script, whose clean-up then waits for a cluster that is gone. They still die with the script.
    """
    from ray._private import services as rays

    services: Any = rays
    popen = getattr(services, "ConsolePopen", None)
    if popen is None:
        log.info(
            "this Ray starts its processes in a way that is not known here; they are forked, in the script's process group"
        )
        yield
        return
    thread = threading.get_ident()

    def spawn(command: list[str], *args: Any, preexec_fn: Any = None, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return popen(command, *args, preexec_fn=preexec_fn, **kwargs)
        if sys.platform != "linux":
            return popen(command, *args, preexec_fn=preexec_fn, process_group=0, **kwargs)
        become = [sys.executable, "-I", "-S", ray_exec.__file__, str(os.getpid())]
        return popen([*become, *command], *args, process_group=0, **kwargs)

    services.ConsolePopen = spawn
    try:
        yield
    finally:
        services.ConsolePopen = popen


async def bounded(function: Callable[..., T], *arguments: Any, limit_s: float | None = None) -> T:
    """Run a blocking call of Ray's in a daemon thread.

    Not in the loop's executor: such a call may hang for ever when the cluster's head has ended, and the interpreter waits at
    its exit for the threads of executors. At that exit itself it runs on the loop, unbounded, since no thread can start then.

    Args:
        function: the call.
        *arguments: of the call.
        limit_s: seconds that it may take; None for those that end by themselves while the cluster is there.

    Raises: TimeoutError; ClusterLostError as soon as the embedded Ray is lost.
    """
    if not threading.main_thread().is_alive():
        if _current is not None:
            _current.require()
        return function(*arguments)
    return await asyncio.wait_for(asyncio.wrap_future(_begun(_current, function, *arguments)), limit_s)


def blocking(function: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking call of Ray's and wait for it in this thread. Raises ClusterLostError as soon as the embedded Ray is
    lost."""
    return function(*arguments) if _current is None else _begun(_current, function, *arguments).result()


def _begun(ray: EmbeddedRay | None, function: Callable[..., T], *arguments: Any) -> concurrent.futures.Future[T]:
    call: concurrent.futures.Future[T] = concurrent.futures.Future()
    call.set_running_or_notify_cancel()
    if ray is not None:
        ray.hold(call)

    def work() -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # Ray was lost meanwhile
            try:
                result = function(*arguments)
            except BaseException as error:  # noqa: BLE001 - passed on to the caller, which awaits it
                call.set_exception(error)
            else:
                call.set_result(result)

    if not call.done():
        threading.Thread(target=work, name="helmsman-ray", daemon=True).start()
    return call


async def answered(answer: Awaitable[T]) -> T:
    """Await an answer of Ray's. Raises ClusterLostError as soon as the embedded Ray is lost."""
    return await (answer if _current is None else _current.wait(answer))


_current: EmbeddedRay | None = None
"""The embedded Ray that this process started last; a process has one at a time."""


def current() -> EmbeddedRay | None:
    """The embedded Ray that this process is connected to, or has lost."""
    return _current


async def end_current(limit_s: float, *, keep_session: bool) -> None:
    """Disconnect this process from Ray; an embedded one ends, as in end_embedded_ray."""
    if _current is None:
        await end_embedded_ray(limit_s, keep_session)
    else:
        await _current.end(limit_s, keep_session=keep_session)


def forget_lost() -> None:
    """Disconnect this process from an embedded Ray that is lost, so that it can start another."""
    if _current is not None and _current.loss is not None:
        run_sync(_current.end(_END_S, keep_session=True))


def has_started_its_cluster() -> bool:
    """Whether the cluster to which this process is connected was started here, and ends with this process."""
    from ray._private import worker

    node: Any = worker._global_node  # private, as there is no public way to know
    return node is not None and bool(node.is_head())


def is_own_node(node_id: str) -> bool:
    """Whether a node belongs to this run: to the cluster that this process, or ``helmsman up``, has started for it."""
    if has_started_its_cluster():
        return True
    import ray

    run_id = os.environ.get(RUN_VARIABLE)
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return bool(run_id) and any(node["NodeID"] == node_id and node["Labels"].get(RUN_LABEL) == run_id for node in nodes)


def script_is_failing() -> bool:
    """Whether an exception is on its way through this thread, or has ended the script."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


async def end_embedded_ray(limit_s: float, keep_session: bool) -> None:
    """Shut the embedded cluster down; its processes are killed if that takes longer than a limit.

    Args:
        limit_s: seconds for Ray to shut down in order.
        keep_session: keep the directory of Ray's session with its logs, as for a run that fails. One that did not shut down in
            order is kept in any case.
    """
    import ray
    from ray._private import worker

    if _current is not None:
        await _current.unwatch()
    if not ray.is_initialized():
        _end_forks()
        return
    node: Any = worker._global_node
    session = _own_session(node)
    try:
        await _alone(ray.shutdown, limit_s=limit_s)
    except TimeoutError:
        keep_session = True
        log.warning("Ray did not shut down within %g s; its processes are killed", limit_s)
        if node is not None:  # private, as there is no public way to end the processes that ray.init started
            await _alone(lambda: node.kill_all_processes(check_alive=False, allow_graceful=False), limit_s=5.0)
    _end_forks()
    if session is not None and not keep_session:
        _remove_session(session)


def _own_session(node: Any) -> Path | None:
    """The directory of the session that this process has started; None where it has joined another's."""
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


async def _alone(function: Callable[[], None], *, limit_s: float) -> None:
    """Run a call that ends Ray in a daemon thread, as bounded does; it also runs when the embedded Ray is lost."""
    if not threading.main_thread().is_alive():
        function()
        return
    await asyncio.wait_for(asyncio.wrap_future(_begun(None, function)), limit_s)
