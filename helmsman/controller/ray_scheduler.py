"""RayScheduler: a placement group per instance and a RayRPCServer actor per worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from pathlib import Path
from typing import Any

from helmsman.api import errors
from helmsman.api.scheduler import Job, Timeouts
from helmsman.controller.base import SchedulerBase
from helmsman.controller.client import Ending, Transport, TransportLostError, WorkerClient, describe_exit, tail_of
from helmsman.controller.deadline import Deadline
from helmsman.controller.devices import visibility
from helmsman.controller.embedded_ray import bounded, choose_authentication, connect, end_embedded_ray
from helmsman.controller.loop import in_thread
from helmsman.rpc_server.codec import Payload
from helmsman.rpc_server.guardian import read_record
from helmsman.rpc_server.messages import ENGINE_WORK, Reply, Request

choose_authentication()

try:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from helmsman.controller import placement_group as placement
    from helmsman.controller.placement_group import get_placement_group_master_ip_and_port
    from helmsman.rpc_server.ray_server import Greeting, RayRPCServer, pack, unpack_reply
except ImportError as error:
    if error.name is not None and error.name.partition(".")[0] != "ray":
        raise
    raise errors.BackendNotInstalledError(
        backend="RayScheduler", package="ray", command="pip install 'helmsman[ray]'"
    ) from error

__all__ = ["RayScheduler", "get_placement_group_master_ip_and_port"]

log = logging.getLogger(__name__)

_ACTOR_OPTIONS: dict[str, Any] = {"concurrency_groups": {"control": 64}}
_RAY_CALL_S = 2.0
"""Longest wait for a call of Ray's while things are taken down; it is milliseconds unless the cluster's head is gone."""
_REMAINS_S = 1.5
"""Longest wait for what a guardian records; milliseconds, but Ray's workers run at low priority, and it with them."""
_PUT_IN_THREAD_BYTES = 1 << 20


class RayScheduler(SchedulerBase):
    """Workers as Ray actors; see SchedulerBase for the other arguments.

    It uses the Ray that this process is connected to; else, if given or in RAY_ADDRESS, joins the cluster at that address; else
    starts an embedded one, which ends with this scheduler, and with this process in any case.

    Args:
        address: a cluster's address, or 'local' for an embedded one in any case.
        num_cpus, num_gpus, resources: logical resources of an embedded cluster; what Ray finds on the machine when None.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        log_dir: str | Path | None = None,
        timeouts: Timeouts | None = None,
        address: str | None = None,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        resources: dict[str, float] | None = None,
    ) -> None:
        super().__init__(seed=seed, log_dir=log_dir, timeouts=timeouts)
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            address = address or os.environ.get("RAY_ADDRESS") or "local"
            sizes = {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": resources} if address == "local" else {}
            connect(address, self.run_id, sizes)
        self._nodes = _alive_nodes()
        self._accelerator = placement.accelerator_resource(self._nodes)
        self._here = ray.get_runtime_context().get_node_id()

    @property
    def n_gpus_per_node(self) -> int:
        return int(max((node["Resources"].get(self._accelerator, 0) for node in self._nodes), default=0))

    async def _launch(
        self, job: Job, siblings: list[WorkerClient] | None, deadline: Deadline, resources: contextlib.AsyncExitStack
    ) -> list[WorkerClient]:
        actors = self._sibling_actors(job, siblings) if siblings else await self._placed_actors(job, deadline, resources)
        workers = [
            RayTransport(actor, f"{job.role}/{index}", self._log_path(job, index), self._here)
            for index, actor in enumerate(actors)
        ]
        for worker in workers:
            resources.push_async_callback(worker.kill)
        greetings = await asyncio.gather(
            *(self._greet(job, index, worker, deadline) for index, worker in enumerate(workers)), return_exceptions=True
        )
        for failure in greetings:
            if isinstance(failure, BaseException):
                raise failure
        clients = []
        for index, (worker, greeting) in enumerate(zip(workers, greetings, strict=True)):
            assert isinstance(greeting, Greeting)
            client = WorkerClient(
                f"{job.role}/{index}", self._address_of(greeting.node_id), greeting.pid, worker.log_path, worker, self.timeouts
            )
            client.environment = self._device_environment(greeting, siblings[index] if siblings else None)
            clients.append(client)
        return clients

    async def _placed_actors(self, job: Job, deadline: Deadline, resources: contextlib.AsyncExitStack) -> list[Any]:
        self._nodes = await asyncio.to_thread(_alive_nodes)
        requests = placement.plan_groups(job, self._accelerator, self.n_gpus_per_node, f"helmsman/{self.run_id}")
        placement.require_feasible(job, requests, self._nodes)
        slots = await placement.reserve(job, requests, deadline, resources)
        actors = []
        for index, slot in enumerate(slots):
            spec = job.spec(index)
            bundle = placement.bundle_of(spec, self._accelerator)
            if spec.ray_placement_strategy == "deferred":
                bundle.pop(self._accelerator, None)  # left to the server that the worker launches
            options = {
                "num_cpus": bundle.pop("CPU", 0),
                "num_gpus": bundle.pop("GPU", 0),
                "memory": bundle.pop("memory", None),
                "resources": bundle or None,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(slot.group, slot.bundle_index),
            }
            actors.append(self._actor(job, index, self._address_of(slot.node_id), options))
        return actors

    def _sibling_actors(self, job: Job, siblings: list[WorkerClient]) -> list[Any]:
        actors = []
        for index, sibling in enumerate(siblings):
            assert isinstance(sibling.transport, RayTransport)
            # Ray is asked for nothing: the devices are the sibling's, and their ids are set explicitly.
            options = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": placement.on_node(sibling.transport.node_id)}
            actors.append(self._actor(job, index, sibling.node, options))
        return actors

    def _actor(self, job: Job, index: int, node: str, options: dict[str, Any]) -> Any:
        return (
            ray.remote(**_ACTOR_OPTIONS)(RayRPCServer)
            .options(
                name=f"{job.role}/{index}/{secrets.token_hex(4)}",
                namespace=f"helmsman-{self.run_id}",
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=10_000,
                **options,
            )
            .remote(self._identity(job, index, node))
        )

    async def _greet(self, job: Job, index: int, worker: RayTransport, deadline: Deadline) -> Greeting:
        try:
            async with asyncio.timeout(deadline.remaining_s):
                return await worker.greet()
        except TimeoutError:
            reason = f"its actor did not answer within {deadline.limit_s:g} s (Timeouts.start_s)"
        except TransportLostError as error:
            reason = str(error)
        raise errors.WorkerStartError(
            role=job.role,
            worker_id=f"{job.role}/{index}",
            node=self._address_of(worker.node_id) if worker.node_id else "unknown",
            reason=reason,
            log_path=worker.log_path,
            log_tail=tail_of(worker.log_path),
        )

    def _device_environment(self, greeting: Greeting, sibling: WorkerClient | None) -> dict[str, str]:
        """The masks of a worker: Ray has set those of granted devices; a sibling copies, one without devices sees none."""
        if sibling is not None:
            return dict(sibling.environment)
        ids = greeting.devices.get(self._accelerator, [])
        kind = "npu" if self._accelerator == "NPU" else "cuda"
        return visibility(kind, ids)

    def _log_path(self, job: Job, index: int) -> str:
        return self._identity(job, index, "").log_path

    def _address_of(self, node_id: str) -> str:
        return next((str(node["NodeManagerAddress"]) for node in self._nodes if node["NodeID"] == node_id), node_id)

    async def _sweep(self) -> None:
        if self._owns_ray:
            await end_embedded_ray(self.timeouts.shutdown_s / 2)


class RayTransport(Transport):
    """Requests as actor tasks, each sent once (no task retries, no restarts)."""

    def __init__(self, actor: Any, worker_id: str, log_path: str, here: str) -> None:
        self._actor = actor
        self._worker_id = worker_id
        self.log_path = log_path
        self.node_id = ""
        self._here = here
        self._reason: BaseException | None = None
        self._turn = asyncio.Lock()
        self._num_sent = 0
        """Engine work sent; Ray starts the tasks of an async actor in any order, so each bears its number."""

    async def greet(self) -> Greeting:
        """The worker's first answer. Raises TransportLostError with the reason."""
        greeting: Greeting = await self._await(self._actor.greet.remote())
        self.node_id = greeting.node_id
        return greeting

    async def send(self, request: Request, payload: Payload) -> tuple[Reply, Payload]:
        method = getattr(self._actor, request.verb.value)
        if request.verb not in ENGINE_WORK:
            return unpack_reply(await self._await(method.remote(*pack(request, payload))))
        async with self._turn:
            packed = pack(request, payload, self._num_sent)
            if payload.nbytes >= _PUT_IN_THREAD_BYTES:  # copied into the object store
                reference = await asyncio.to_thread(method.remote, packed[0], packed[1])
            else:
                reference = method.remote(*packed)
            self._num_sent += 1  # not before: the worker waits for every number
        return unpack_reply(await self._await(reference))

    async def _await(self, reference: Any) -> Any:
        try:
            return await reference
        except ray.exceptions.RayTaskError as error:
            raise errors.ProtocolError(f"{self._worker_id}: the server in the worker failed: {error}") from error
        except ray.exceptions.RayError as error:
            self._reason = error
            raise TransportLostError(_reason_text(error)) from error

    async def ending(self) -> Ending:
        if self.node_id and self.node_id != self._here and not await in_thread(_is_alive, self.node_id):
            return Ending("was lost with its node")
        record, tail = await self._remains()
        if record is None:
            cause = describe_exit(None, None)
            if isinstance(self._reason, ray.exceptions.OutOfMemoryError):
                cause = "was ended by Ray's memory monitor, because its node ran out of memory"
            return Ending(cause, log_tail=tail)
        code, number = record["exit_code"], record["exit_signal"]
        return Ending(describe_exit(code, number), code, number, tail)

    async def _remains(self) -> tuple[dict[str, int | None] | None, str]:
        """What the worker's guardian recorded and the end of its log, read on the worker's node."""
        if self.node_id in ("", self._here):
            return await in_thread(_read_remains, self.log_path)
        reader = ray.remote(num_cpus=0, max_retries=0)(_read_remains)
        reference = reader.options(scheduling_strategy=placement.on_node(self.node_id)).remote(self.log_path)
        try:
            async with asyncio.timeout(_REMAINS_S):
                remains: tuple[dict[str, int | None] | None, str] = await reference
                return remains
        except (TimeoutError, ray.exceptions.RayError) as error:
            log.warning("%s: the remains on its node could not be read: %s", self._worker_id, error)
            return None, ""

    async def kill(self) -> None:
        with contextlib.suppress(TimeoutError):
            await bounded(lambda: ray.kill(self._actor, no_restart=True), limit_s=_RAY_CALL_S)
        with contextlib.suppress(TransportLostError, TimeoutError):
            async with asyncio.timeout(3.0):
                await self._await(self._actor.greet.remote())  # fails as soon as the actor is known to be dead


def _reason_text(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


def _alive_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def _is_alive(node_id: str) -> bool:
    return any(node["NodeID"] == node_id for node in _alive_nodes())


def _read_remains(log_path: str) -> tuple[dict[str, int | None] | None, str]:
    """The record of a worker's end, for which its guardian needs a moment, and its log's tail."""
    from helmsman.rpc_server.guardian import wait_until

    wait_until(lambda: read_record(log_path) is not None, _REMAINS_S)
    return read_record(log_path), tail_of(log_path)
