"""A fake scheduler, whose engines run in this process and die when a test kills them."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from helmsman._base.event_loop import background_loop, run_sync
from helmsman.api import errors
from helmsman.api.plan import Node
from helmsman.api.scheduler import (
    CONTROLLER,
    EngineSpec,
    Job,
    PreemptionNotice,
    ResultHandle,
    Scheduler,
    Timeouts,
    Worker,
    WorkerHealth,
    WorkerState,
    WorkerStatus,
)


class Sent(NamedTuple):
    """One call that a scheduler received."""

    worker_id: str
    method: str
    args: tuple[Any, ...]
    rpc_meta: Mapping[str, Any]
    timeout: float | None


def _unsupported(name: str) -> Any:
    def method(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"a fake has no {name}")

    return method


_Base: Any = type(
    "_Base", (Scheduler,), {name: _unsupported(name) for name in Scheduler.__abstractmethods__}
)


class FakeScheduler(_Base):  # type: ignore[misc]
    """Runs engines on the background loop, and records every call in ``sent``.

    Args:
        ips: Addresses of the workers, by index.
    """

    n_gpus_per_node = 0

    def __init__(self, ips: Sequence[str] = ()) -> None:
        self.timeouts = Timeouts(call_s=60.0, create_engine_s=60.0)
        self.ips = ips
        self.jobs: dict[str, Job] = {}
        self.set_variables: dict[str, dict[str, str]] = {}
        self.probed: list[tuple[str, str, int]] = []
        self.engines: dict[str, Any] = {}
        self.sent: list[Sent] = []
        self.kept: dict[str, Any] = {}
        self.released: list[str] = []
        self.closed = False
        self._deaths: dict[str, asyncio.Future[None]] = {}

    def kill(self, worker_id: str) -> None:
        """End a worker, so that its calls fail."""
        background_loop().call_soon_threadsafe(self._deaths[worker_id].set_result, None)

    def methods(self, worker_id: str) -> list[str]:
        """Return the methods called on a worker, in order."""
        return [call.method for call in self.sent if call.worker_id == worker_id]

    # --- roles ------------------------------------------------------------------------------------

    def create_workers(self, job: Job) -> list[str]:
        job.validate()
        self._require_open("create_workers")
        if job.role in self.jobs:
            raise errors.RoleExistsError(role=job.role, num_workers=job.replicas)
        self.jobs[job.role] = job
        ids = [f"{job.role}/{index}" for index in range(job.replicas)]
        self._deaths |= {worker_id: background_loop().create_future() for worker_id in ids}
        return ids

    def delete_workers(self, role: str | None = None, reverse_order: bool = False) -> None:
        self._require_open("delete_workers")
        for name in [role] if role is not None else list(self.jobs):
            job = self._job(name)
            del self.jobs[name]
            for index in range(job.replicas):
                self.engines.pop(f"{name}/{index}", None)
                if not (death := self._deaths.pop(f"{name}/{index}")).done():
                    background_loop().call_soon_threadsafe(death.set_result, None)

    def restart_worker(self, worker_id: str) -> None:
        self.engines.pop(worker_id, None)
        self._deaths[worker_id] = background_loop().create_future()

    def restart_workers(self, role: str, *, elsewhere: bool = False) -> None:
        for worker in self.get_workers(role):
            self.restart_worker(worker.id)

    def get_workers(self, role: str, timeout: float | None = None) -> list[Worker]:
        job = self._job(role)
        return [
            Worker(
                id=f"{role}/{index}",
                ip=self.ips[index] if self.ips else "127.0.0.1",
                engine_ports=[
                    str(20000 + 10 * index + port) for port in range(job.spec(index).port_count)
                ],
            )
            for index in range(job.replicas)
        ]

    def nodes(self) -> list[Node]:
        return [Node(node_id="", address="127.0.0.1")]

    def status(self) -> list[WorkerStatus]:
        return [
            WorkerStatus(
                worker_id=worker_id,
                state=WorkerState.FAILED if death.done() else WorkerState.READY,
                node="127.0.0.1",
                pid=1,
                log_path="",
            )
            for worker_id, death in self._deaths.items()
        ]

    def stacks(self, role: str) -> dict[str, str]:
        return {}

    def close(self) -> None:
        if not self.closed:
            self.delete_workers()
            self.closed = True

    def _require_open(self, operation: str) -> None:
        if self.closed:
            raise errors.SchedulerClosedError(operation=operation)

    def _job(self, role: str) -> Job:
        if role not in self.jobs:
            raise errors.RoleNotFoundError(name=role, known=list(self.jobs))
        return self.jobs[role]

    # --- workers ----------------------------------------------------------------------------------

    async def set_worker_env(self, worker_id: str, env: Mapping[str, str]) -> None:
        self.set_variables.setdefault(worker_id, {}).update(env)

    async def check_health(self, worker_id: str, timeout: float | None = None) -> WorkerHealth:
        if self._deaths[worker_id].done():
            raise make_death(worker_id)
        engines = {worker_id: "Engine"} if worker_id in self.engines else {}
        return WorkerHealth(worker_id=worker_id, pid=1, node="127.0.0.1", engines=engines)

    async def preemption_notices(self) -> dict[str, PreemptionNotice]:
        return {}

    async def kill_worker(self, worker_id: str, cause: str) -> None:
        self.kill(worker_id)

    async def probe_rendezvous(self, role: str, address: str, port: int) -> None:
        self.probed.append((role, address, port))

    # --- calls ------------------------------------------------------------------------------------

    async def create_engine(
        self,
        worker_id: str,
        engine: str | type[Any] | EngineSpec,
        engine_name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        assert isinstance(engine, type)
        self.sent.append(Sent(worker_id, "__init__", args, {}, None))
        try:
            instance = engine(*args, **kwargs)
            instance.worker_id = worker_id
            self.engines[worker_id] = instance
        except Exception as error:
            raise errors.EngineCreationError(
                **_remote(worker_id, engine_name, "__init__", error)
            ) from error

    def call_engine(self, *args: Any, **kwargs: Any) -> Any:
        return run_sync(self.async_call_engine(*args, **kwargs))

    async def async_call_engine(
        self,
        worker_id: str,
        method: str,
        engine_name: str | None = None,
        *args: Any,
        rpc_meta: Mapping[str, Any] | None = None,
        rpc_timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        self._require_open("async_call_engine")
        self.sent.append(Sent(worker_id, method, args, rpc_meta or {}, rpc_timeout))
        kwargs |= (rpc_meta or {}).get("kwargs", {})
        work = asyncio.ensure_future(self._run(worker_id, method, args, kwargs))
        death = self._deaths[worker_id]
        await asyncio.wait({work, death}, timeout=rpc_timeout, return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            work.cancel()
            raise make_death(worker_id, engine_name, method)
        if not work.done():
            raise errors.CallTimeoutError(
                worker_id=worker_id,
                engine_name=engine_name,
                method=method,
                elapsed_s=rpc_timeout or 0.0,
                limit_s=rpc_timeout or 0.0,
                limit_source="the test",
                worker_alive=True,
                state="the call still runs",
                stack="",
            )
        try:
            value = work.result()
        except Exception as error:
            if type(error).__module__ == "helmsman.api.errors":
                raise
            raise errors.EngineCallError(
                **_remote(worker_id, engine_name, method, error)
            ) from error
        if rpc_meta and rpc_meta.get("keep") and value is not None:
            return self._keep(worker_id, value)
        return value

    async def _run(
        self, worker_id: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        engine = self.engines[worker_id]
        function = getattr(engine, method, None)
        if function is None:
            raise errors.MethodNotFoundError(
                worker_id=worker_id,
                engine_name=worker_id,
                method=method,
                engine_type=type(engine).__name__,
                suggestions=(),
            )
        result = function(*(self._value(argument) for argument in args), **kwargs)
        return await result if inspect.isawaitable(result) else result

    def _value(self, argument: Any) -> Any:
        if not isinstance(argument, ResultHandle):
            return argument
        if argument.id in self.released:
            raise errors.HandleLostError(
                worker_id=argument.worker_id, handle_id=argument.id, reason="it was released"
            )
        return self.kept[argument.id]

    def put(self, value: Any) -> ResultHandle:
        return self._keep(CONTROLLER, value)

    def get(self, handle: ResultHandle) -> Any:
        return self._value(handle)

    def release(self, handle: ResultHandle) -> None:
        self.released.append(handle.id)

    def _keep(self, worker_id: str, value: Any) -> ResultHandle:
        handle = ResultHandle(
            id=f"handle-{len(self.kept)}", worker_id=worker_id, location=None, nbytes=0, summary=""
        )
        self.kept[handle.id] = value
        return handle


def _remote(
    worker_id: str, engine_name: str | None, method: str, error: Exception
) -> dict[str, Any]:
    return {
        "worker_id": worker_id,
        "engine_name": engine_name or worker_id,
        "method": method,
        "remote_type": type(error).__qualname__,
        "remote_message": str(error),
        "remote_traceback": "".join(traceback.format_exception(error)),
    }


def make_death(
    worker_id: str, engine_name: str | None = None, method: str = "health"
) -> errors.WorkerFailedError:
    """Return the error of a call to a killed worker."""
    return errors.WorkerFailedError(
        worker_id=worker_id,
        engine_name=engine_name,
        method=method,
        node="127.0.0.1",
        pid=1,
        cause="was ended by SIGKILL",
        exit_signal=9,
    )
