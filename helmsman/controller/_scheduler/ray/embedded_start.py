"""Starts an embedded Ray, detached from the terminal, within one deadline; or joins a cluster."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helmsman._base.event_loop import Deadline, run_on_loop, submit
from helmsman._process import ray_exec
from helmsman._process.guardian import TAG_VARIABLE, descendants, guard, process_table
from helmsman.api.errors import ClusterMismatchError, RayStartError
from helmsman.api.scheduler import Timeouts
from helmsman.controller._scheduler.environment import short_spin
from helmsman.controller._scheduler.ray.embedded import (
    EmbeddedRay,
    begin_shutdown,
    newest_log,
    newest_session_logs,
    remember,
    settle,
    tail_without_dumps,
)
from helmsman.controller._scheduler.ray.start_limits import CORE, RayStart
from helmsman.controller._scheduler.run_registry import RUN_LABEL, RUN_VARIABLE, make_log_dir
from helmsman.rpc_server._ray_forks.install import end_forks, forked_workers
from helmsman.rpc_server._ray_forks.ray_patches import only_core_processes, replaced

log = logging.getLogger(__name__)

_INTERRUPTED_START_S = 15.0
"""Longest wait for an interrupted start to end by itself. Ray cannot be stopped midway: without its
head it waits for half a minute, and the script with it.
"""
_END_S = 3.0
"""Limit for Ray to shut down after that."""
_NEVER_S = 365 * 86_400
_ATTEMPTS = 2
"""Most attempts to start Ray. On a busy machine its processes may miss limits that cannot be
changed.
"""
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # only if the script imported ray before us, which fixed the mode
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # as for local workers; the default of 15 starves workers on a busy machine
    "RAY_worker_niceness": "0",
    # of 5 s by default, all of which are spent if the head has ended
    "RAY_task_events_shutdown_flush_timeout_ms": "500",
}
"""Settings of an embedded Ray, unless the script has set them."""


def connect(
    address: str,
    run_id: str,
    sizes: dict[str, Any],
    log_dir: Path,
    preload: Sequence[str] | None,
    start_s: float = Timeouts().start_s,
) -> None:
    """Join the cluster at ``address``, or start an embedded one for 'local'.

    Args:
        address: Address of the cluster, or 'local'.
        run_id: Id of the run.
        sizes: Logical resources of an embedded cluster.
        log_dir: Folder of the run's logs.
        preload: Modules with which the workers of an embedded cluster are forked; None lets Ray
            start each by itself.
        start_s: Limit of the start of an embedded cluster, in seconds.

    Raises:
        RayStartError: The embedded Ray did not start.
        ClusterMismatchError: The cluster belongs to another run of ``helmsman up``.
        Exception: The errors of ray.init for another cluster.
    """
    remember(None)
    deadline = Deadline(start_s)
    for attempt in range(1, _ATTEMPTS + 1):
        start = RayStart(deadline) if address == "local" else None
        try:
            remember(_connect(address, run_id, sizes, log_dir, preload, start))
        except RayStartError as error:
            if attempt == _ATTEMPTS or deadline.passed:
                raise
            log.warning("Ray did not start, trying once more: %s", error.reason)
            settle(deadline.remaining_s)
        else:
            return


def _connect(
    address: str,
    run_id: str,
    sizes: dict[str, Any],
    log_dir: Path,
    preload: Sequence[str] | None,
    start: RayStart | None,
) -> EmbeddedRay | None:
    import ray

    def init(**settings: Any) -> None:
        name = f"helmsman-{run_id}"
        ray.init(
            address=address,
            namespace=name,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **sizes,
            **settings,
        )

    async def join_or_start() -> EmbeddedRay | None:
        if start is None:
            init()
            return None
        for name, value in {**_ENVIRONMENT, **short_spin(os.environ)}.items():
            os.environ.setdefault(name, value)
        os.environ[TAG_VARIABLE] = (
            f"{run_id}/ray"  # inherited by all of its processes, for helmsman clean
        )
        try:
            # A client that cannot reach Ray's head for this time ends the process, and a client
            # that blocks in a call cannot be disconnected. ray.init passes the setting to the core
            # worker's clients; earlier clients need it here.
            settings = {"gcs_rpc_server_reconnect_timeout_s": _NEVER_S}
            raylet: Any = ray._raylet
            raylet.Config.initialize(json.dumps({**settings, **RayStart.SETTINGS}).encode())
            if preload is not None:
                with contextlib.suppress(OSError):
                    # opening the fork server's log fails then, which is handled there
                    make_log_dir(log_dir, run_id)
            forking = forked_workers(run_id, log_dir / "ray_forkserver.log", preload)
            with forking, _spawning(), start.watching(), only_core_processes():
                init(include_dashboard=False, _system_config=settings)
            return _watched()
        finally:
            del os.environ[TAG_VARIABLE]

    others = descendants(os.getpid(), process_table())
    # On the loop's thread, which lives as long as the process, since an embedded cluster ends with
    # the thread that started it. In the script's own thread Ray would also handle signals itself,
    # and a signal during the start would crash the interpreter.
    starting = submit(join_or_start())
    try:
        started = starting.result()
        _require_own_run(address)
        if start is not None:
            _guard_raylet(f"{run_id}/ray")
        return started
    except BaseException as error:
        concurrent.futures.wait([starting], timeout=_INTERRUPTED_START_S)
        if (
            starting.done()
            and starting.exception() is None
            and (unwanted := starting.result()) is not None
        ):
            run_on_loop(unwanted.unwatch)
        is_rays = isinstance(error, (RuntimeError, OSError)) or type(error) is Exception
        failure = _failed_start(error, start, others) if start is not None and is_rays else None
        _end_half_started(others)
        end_forks()
        if failure is not None:
            raise failure from error
        raise
    finally:
        if (
            threading.current_thread() is threading.main_thread()
            and (handler := signal.getsignal(signal.SIGTERM)) is not None
        ):
            # Ray has replaced the C-level handler by one that prints a stack at every SIGTERM
            signal.signal(signal.SIGTERM, handler)


def _watched() -> EmbeddedRay:
    from ray._private import worker

    # private: there is no public way to list the processes that ray.init started
    node: Any = worker._global_node
    processes = {name: each.process for name in CORE for each in node.all_processes.get(name, [])}
    return EmbeddedRay(processes, Path(node.get_logs_dir_path()))


def _failed_start(error: BaseException, start: RayStart, others: set[int]) -> RayStartError:
    """Build the error of a failed start from that of ray.init, while its processes still exist.

    ``others`` are pids below this process that existed before the start.
    """
    from ray._common import utils

    table = process_table()
    started = sorted(descendants(os.getpid(), table) - others)
    described = [
        f"{_name_of(pid)} (pid {pid}, {_STATES.get(table[pid].state, table[pid].state)})"
        for pid in started
    ]
    folder = Path(utils.get_default_ray_temp_dir())  # type: ignore[no-untyped-call]
    logs = newest_session_logs(folder, f"session_*_{os.getpid()}")
    log_path = newest_log(logs, start.blamed) if logs else ""
    return RayStartError(
        reason=f"{type(error).__name__}: {error}",
        processes=described,
        log_path=log_path,
        log_tail=tail_without_dumps(log_path) if log_path else "",
    )


_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for the disk",
    "T": "stopped",
    "Z": "ended",
}


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "a process that has ended"


def _require_own_run(address: str) -> None:
    """Under ``helmsman up``, check that the joined cluster is the one that it started.

    An earlier cluster, or that of another job, may have taken its port.
    """
    run_id = os.environ.get(RUN_VARIABLE)
    if not run_id or address != os.environ.get("RAY_ADDRESS"):
        return
    import ray

    runs = {str(node["Labels"].get(RUN_LABEL)) for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    if run_id not in runs:
        raise ClusterMismatchError(
            f"the cluster at {address} belongs to another run: its nodes belong to "
            f"{', '.join(sorted(runs)) or 'none'}, expected run {run_id} ({RUN_VARIABLE}). The "
            "cluster of this run has most likely ended; start it again"
        )


def _guard_raylet(tag: str) -> None:
    """Guard the raylet, so that its children end with it if the script is killed.

    Its agents detect its death, but first report to the head. If the head has ended too, they wait
    for it a minute or more (seen with Ray 2.60, about every second time).
    """
    from ray._private import worker

    # private: there is no public way to list the processes that ray.init started
    node: Any = worker._global_node
    for process in node.all_processes["raylet"]:
        guard(process.process.pid, tag)


def _end_half_started(others: set[int]) -> None:
    """End the processes of a failed start, except those that existed before it.

    Ray ends its own processes, but the raylet's children would remain for a minute or two.
    """
    import ray

    started = descendants(os.getpid(), process_table()) - others
    concurrent.futures.wait([begin_shutdown(ray.shutdown)], _END_S)
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _spawning() -> contextlib.AbstractContextManager[None]:
    """Spawn the Ray processes of this thread's block; on Linux without a fork of the script.

    Each process gets its own process group. Otherwise a signal to the script's group, such as the
    terminal's Ctrl-C, would end Ray before the script, whose clean-up then waits for a cluster that
    has ended. The processes still die with the script. See ray_exec for Linux.
    """
    from ray._private import services

    if not hasattr(services, "ConsolePopen"):
        log.info(
            "this version of Ray has no services.ConsolePopen; its processes are forked, in the "
            "script's process group"
        )
    return replaced(services, ConsolePopen=_spawn)


def _spawn(
    popen: Any, command: list[str], *args: Any, preexec_fn: Any = None, **kwargs: Any
) -> Any:
    if sys.platform != "linux":
        return popen(command, *args, preexec_fn=preexec_fn, process_group=0, **kwargs)
    become = [sys.executable, "-I", "-S", ray_exec.__file__, str(os.getpid())]
    return popen([*become, *command], *args, process_group=0, **kwargs)
