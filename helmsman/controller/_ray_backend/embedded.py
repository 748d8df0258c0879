"""The Ray to which this process is connected: calls of it that fail once it is lost, and its end in bounded time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from helmsman.controller._aio.event_loop import run_sync
from helmsman.controller._node.run_registry import RUN_LABEL, RUN_VARIABLE
from helmsman.controller._ray_backend.process_watch import EmbeddedRay
from helmsman.rpc_server._process.safe_files import remove_tree
from helmsman.rpc_server._ray_forks.install import end_forks

T = TypeVar("T")

log = logging.getLogger(__name__)

_END_S = 3.0
"""How long a lost Ray may take to shut down."""


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


def remember(ray: EmbeddedRay | None) -> None:
    """Note the embedded Ray that this process is connected to from now on; None for another cluster."""
    global _current
    _current = ray


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
        end_forks()
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
    end_forks()
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
