"""A worker on Ray: its actor, and the channel to it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import mmap
import os
import secrets
import select
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import ray

from helmsman._base.event_loop import run_in_executor
from helmsman._process.guardian import read_record, stat_fields, wait_until
from helmsman._process.oom import OomCount, oom_kills_since
from helmsman._process.ports import RANGE_VARIABLE
from helmsman._process.pulse import find_page, observe
from helmsman._wire.auth import connect
from helmsman._wire.codec import Payload
from helmsman._wire.messages import WorkerIdentity
from helmsman._wire.segments import HAS_SEGMENTS, pack
from helmsman.api import errors
from helmsman.api.scheduler import CONTROLLER, ResultHandle
from helmsman.controller._placement.placement import Placement
from helmsman.controller._scheduler.ray import cluster_state
from helmsman.controller._scheduler.ray import placement_groups as placement
from helmsman.controller._scheduler.ray.embedded import EmbeddedRay, blocking, bounded, keeping
from helmsman.controller._scheduler.transport.base import (
    Ending,
    TransportLostError,
    describe_exit,
    log_size,
    tail_of,
)
from helmsman.controller._scheduler.transport.channel import Channel
from helmsman.rpc_server._server.observer import ask_observer
from helmsman.rpc_server._server.ray_server import ChannelAddress, Greeting, RayHandleStore

log = logging.getLogger(__name__)

_RAY_CALL_S = 2.0
"""Longest wait for a Ray call during teardown. It takes milliseconds unless the head has stopped.
"""
_DEATH_S = 3.0
"""Longest wait for Ray to report that a killed actor is dead."""
_REMAINS_S = 1.5
"""Longest wait for a guardian's record of a worker's end, which takes milliseconds on an idle
machine.
"""
_RECORDED_S = 0.5
"""Longest wait for that record if the worker was given up and may still be running."""
_READ_REMAINS_S = 5.0
"""Longest wait for a task that reads the record on another node; Ray may have to start a process
for it.
"""
_CONNECT_S = 3.0
"""Limit of connecting, and again of authentication."""
_PUBLISH_S = 60.0
"""Longest wait for a worker to copy a kept value to Ray's object store."""
_SAMPLE = b"helmsman"


class ControllerStore(RayHandleStore):
    """Values that the script puts.

    ``publish`` makes the worker that keeps a value copy it to Ray's object store, and returns the
    reference. It blocks.
    """

    def __init__(self, publish: Callable[[ResultHandle], Any]) -> None:
        super().__init__(in_segments=True)
        self._publish = publish

    def as_references(self, payload: Payload) -> Payload:
        """Make every handle of the payload fetchable from any node. Blocks.

        Raises:
            HandleLostError: A value is lost.
        """
        if not payload.handles:
            return payload
        handles = [
            msgspec.structs.replace(handle, location=self._reference(handle))
            if type(handle.location) is bytes
            else handle
            for handle in payload.handles
        ]
        return Payload(payload.data, payload.buffers, handles)

    def _reference(self, handle: ResultHandle) -> Any:
        return self.publish(handle) if handle.worker_id == CONTROLLER else self._publish(handle)


class RayWorker:
    """A worker's actor: its start, its end, and payloads through Ray's object store.

    The actor is never restarted and its tasks are never retried.
    """

    def __init__(
        self,
        actor: Any,
        place: Placement,
        here: str,
        store: ControllerStore,
        embedded: EmbeddedRay | None = None,
    ) -> None:
        self._made = actor
        self._ray = embedded
        self.place = place
        self._here = here
        self._worker_id = "a worker that starts"
        self.log_path = ""
        self.log_start = 0
        """Size of the log in bytes before this process."""
        self._pid = 0
        self._oom: OomCount | None = None
        self._reason: BaseException | None = None
        self._killed = False
        self._store = store
        self._watch: asyncio.Future[None] | None = None
        self._killing: asyncio.Future[None] | None = None
        self._tag = ""
        self._page: mmap.mmap | None = None
        """The worker's pulse page, while it lives, if it can be mapped here."""
        self._is_here = False
        """Whether its page could be mapped."""
        self._observer: Callable[[float], Awaitable[bytes]] | None = None
        """Queries the worker's observer within a limit in seconds; None if this process observes
        the worker itself.
        """

    @property
    def _actor(self) -> Any:
        """The actor.

        Raises TransportLostError if its cluster is lost, since a call would make Ray start another
        cluster.
        """
        if self._ray is not None and (loss := self._ray.loss) is not None:
            raise TransportLostError(str(loss)) from loss
        return self._made

    async def greet(self) -> Greeting:
        """Wait for the worker's first reply.

        Raises:
            TransportLostError: The actor did not start; the message has the reason.
        """
        greeting: Greeting = await self._await(self._actor.greet.remote())
        self._pid, self._oom = greeting.pid, greeting.oom
        return greeting

    async def adopt(self, identity: WorkerIdentity, *, tls: bool) -> Channel:
        """Assign an identity to the worker and open its channel.

        ``tls`` encrypts a channel between machines.

        Raises:
            TransportLostError: The worker has died or cannot be reached; the message has the
                reason.
        """
        self._worker_id, self.log_path = identity.worker_id, identity.log_path
        # used in errors until the worker replies, if it is on this node
        self.log_start = log_size(identity.log_path)
        self.log_start = await self._await(self._actor.adopt.remote(identity))
        self._tag = f"{identity.run_id}/{identity.worker_id}"
        if HAS_SEGMENTS:
            self._page = find_page(self._pid, self._tag)
        self._is_here = self._page is not None
        # One key per worker, so that a relay in the network cannot redirect the connection to
        # another worker of the run.
        channel = await self._open_channel(secrets.token_bytes(32), tls)
        self._watch = asyncio.ensure_future(self._watch_end(channel))
        return channel

    async def _open_channel(self, key: bytes, tls: bool) -> Channel:
        with pack([_SAMPLE]) if HAS_SEGMENTS else contextlib.nullcontext() as sample:
            location = None if sample is None else sample.location
            address: ChannelAddress = await self._await(
                self._actor.open_channel.remote(key, location, tls)
            )
        if address.shares_memory:
            # It may belong to another user or network namespace although it can map our memory.
            with contextlib.suppress(OSError, errors.ProtocolError):
                return await self._channel(address, key, tls=False)
            address = await self._await(self._actor.open_channel.remote(key, None, tls))
        if address.observer_port:
            self._observer = functools.partial(
                ask_observer, (address.where[0], address.observer_port), key, tls=tls
            )
        try:
            return await self._channel(address, key, tls=tls)
        except (OSError, errors.ProtocolError) as error:
            here, there = ray.util.get_node_ip_address(), address.where[0]  # type: ignore[no-untyped-call]
            raise TransportLostError(
                f"this process on {here} cannot connect to it at {there}, TCP port "
                f"{address.where[1]}: {error}. Open this port "
                f"from {here} to {there}, or set {RANGE_VARIABLE} on the worker's node to ports "
                "that are open"
            ) from error

    async def _channel(self, address: ChannelAddress, key: bytes, *, tls: bool) -> Channel:
        connecting = functools.partial(connect, address.where, key, _CONNECT_S, tls=tls)
        channel = Channel(
            self._worker_id, connecting, self, shares_memory=address.shares_memory, side_path=self
        )
        await channel.open()
        return channel

    async def observe(self, limit_s: float) -> bytes:
        if self._page is not None:
            return await run_in_executor(observe, self._page, self._pid)
        if self._observer is None:
            return b""
        try:
            return await self._observer(limit_s)
        except (OSError, EOFError, errors.ProtocolError) as error:
            log.debug("%s: its observer did not answer: %s", self._worker_id, error)
            return b""

    def publish(self, handle: ResultHandle) -> Any:
        """Return the object reference of a value that the worker keeps. Blocks.

        Raises:
            HandleLostError: The value is lost.
        """
        try:
            reference = self._actor.publish.remote(handle)
            return blocking(functools.partial(ray.get, reference, timeout=_PUBLISH_S))[0]
        except ray.exceptions.GetTimeoutError as error:
            reason = f"its worker did not publish it within {_PUBLISH_S:g} s"
            raise errors.HandleLostError(
                worker_id=handle.worker_id, handle_id=handle.id, reason=reason
            ) from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, errors.HandleLostError):
                raise error.cause from None
            raise errors.ProtocolError(
                f"{self._worker_id}: the server in the worker failed: {error}"
            ) from error
        except (ray.exceptions.RayError, TransportLostError, errors.ClusterLostError) as error:
            reason = f"its worker has ended: {_reason_text(error)}"
            raise errors.HandleLostError(
                worker_id=handle.worker_id, handle_id=handle.id, reason=reason
            ) from error

    async def _watch_end(self, channel: Channel) -> None:
        """Close the channel when Ray reports the worker's death.

        The connection to a node that vanishes does not close by itself.
        """
        with contextlib.suppress(TransportLostError, errors.ProtocolError):
            await self._await(self._actor.live.remote())
        # The role keeps this object until its own end, and a page has a descriptor.
        self._page = None
        channel.close()

    async def pending(self) -> str:
        """State of its actor in Ray, as part of a start error."""
        state = await bounded(cluster_state.actor_state, self._actor._actor_id.hex())
        return f"Ray reports its state as {state or 'unknown'} on node {self.place.node}"

    async def bring(self, request_id: int, payload: Payload) -> None:
        await self._await(
            await bounded(
                lambda: self._actor.bring.remote(request_id, self._store.as_references(payload))
            )
        )

    async def fetch(self, request_id: int) -> Payload:
        (payload,) = await self._await(self._actor.fetch.remote(request_id))
        if isinstance(payload, ray.ObjectRef):
            payload = await self._await(payload)
        assert isinstance(payload, Payload)
        return payload

    async def wait_ended(self, limit_s: float) -> None:
        """Do nothing: a worker on Ray is ended by ``kill``."""

    async def _await(self, reference: Any) -> Any:
        try:
            with keeping((reference, self)):  # its handles of the actor are references, too
                return await (reference if self._ray is None else self._ray.wait(reference))
        except errors.ClusterLostError as error:
            raise TransportLostError(str(error)) from error
        except ray.exceptions.RayTaskError as error:
            raise errors.ProtocolError(
                f"{self._worker_id}: the server in the worker failed: {error}"
            ) from error
        except ray.exceptions.RayError as error:
            self._reason = error
            raise TransportLostError(_reason_text(error)) from error

    async def ending(self, lost_because: str) -> Ending:
        try:
            return await self._ending(lost_because)
        except errors.ClusterLostError as loss:
            return Ending(
                f"was lost with the Ray that this scheduler started: {loss.cause}",
                log_tail=loss.log_tail,
                log_path=loss.log_path,
                aftermath="All workers of this scheduler are lost. Close it and start another; "
                "this process can do so.",
            )

    async def _ending(self, lost_because: str) -> Ending:
        if self._ray is not None:
            self._ray.require()
        if self.place.node_id != self._here and (
            loss := await bounded(cluster_state.loss_of_node, self.place.node_id)
        ):
            return Ending(f"was lost with its node: {loss}")
        record, num_oom_kills, tail = await self._remains(
            _REMAINS_S if not lost_because else _RECORDED_S
        )
        if self._ray is not None:
            self._ray.require()  # Ray's end may be detected shortly after its workers' end
        if record is None and lost_because:  # it is still running
            self._killing = asyncio.ensure_future(self.kill())
            return Ending(
                f"was ended by this scheduler: {lost_because}", None, signal.SIGKILL, tail
            )
        if record is None:
            cause = describe_exit(None, None)
            if isinstance(self._reason, ray.exceptions.OutOfMemoryError):
                cause = "was ended by Ray's memory monitor, because its node ran out of memory"
            return Ending(cause, log_tail=tail)
        code, number = record["exit_code"], record["exit_signal"]
        return Ending(describe_exit(code, number, num_oom_kills), code, number, tail)

    async def _remains(self, limit_s: float) -> _Remains:
        """Read the guardian's record, the OOM kills and the log's tail on the worker's node."""
        if self.place.node_id == self._here or (self._is_here and os.path.exists(self.log_path)):
            # on this machine
            return await run_in_executor(
                _read_remains, self.log_path, self._pid, self.log_start, self._oom, limit_s
            )
        reader = ray.remote(num_cpus=0, max_retries=0)(_read_remains)
        there = reader.options(scheduling_strategy=placement.on_node(self.place.node_id))
        reference = there.remote(self.log_path, self._pid, self.log_start, self._oom, limit_s)
        try:
            async with asyncio.timeout(_READ_REMAINS_S):
                with keeping(reference):
                    remains: _Remains = await reference
                return remains
        except (TimeoutError, ray.exceptions.RayError) as error:
            log.warning("%s: its exit record could not be read: %s", self._worker_id, error)
            return None, 0, ""

    async def kill(self) -> None:
        if self._killed:
            return
        if self._ray is not None and self._ray.loss is not None:
            return
        try:
            await bounded(lambda: ray.kill(self._made, no_restart=True), limit_s=_RAY_CALL_S)
        except (TimeoutError, errors.ClusterLostError):
            pass
        except ray.exceptions.RayError:  # the script has shut Ray down, and its actors with it
            self._killed = True
            return
        with contextlib.suppress(TransportLostError, TimeoutError):
            async with asyncio.timeout(_DEATH_S):
                # raises as soon as Ray reports the actor's death
                await self._await(self._actor.greet.remote())
        if self._is_here:
            await run_in_executor(self._end_here)
        self._killed = True

    def _end_here(self) -> None:
        """Wait for the process to end, and kill it if it is stopped; others are left to Ray.

        Ray (2.52 to 2.56 at least) reports the death of a stopped process seconds before it kills
        it. It would report our kill of any other process as a failure.
        """
        try:
            pidfd = os.pidfd_open(self._pid)
        except OSError:
            return  # it has ended
        try:
            # A page with this tag shows that the pid has not been reused.
            if stat_fields(self._pid)[:1] == [b"T"] and find_page(self._pid, self._tag) is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            ended.poll(_DEATH_S * 1000)
        finally:
            os.close(pidfd)


def _reason_text(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


_Remains = tuple[dict[str, int | None] | None, int, str]


def _read_remains(
    log_path: str, pid: int, log_start: int, before: OomCount | None, limit_s: float
) -> _Remains:
    """The guardian's record of a worker's end, OOM kills since ``before`` and the tail of the log.

    The guardian needs a moment to write the record.
    """
    wait_until(lambda: read_record(log_path, pid) is not None, limit_s)
    return read_record(log_path, pid), oom_kills_since(before), tail_of(log_path, start=log_start)
