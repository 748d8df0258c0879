"""The way from the controller to one worker on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import mmap
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import ray

from helmsman.api import errors
from helmsman.api.scheduler import CONTROLLER, ResultHandle
from helmsman.controller._aio.event_loop import in_thread
from helmsman.controller._placement.place import Place
from helmsman.controller._ray_backend import cluster_state
from helmsman.controller._ray_backend import placement_groups as placement
from helmsman.controller._ray_backend.embedded import blocking, bounded
from helmsman.controller._ray_backend.process_watch import EmbeddedRay
from helmsman.controller._transport.base import Ending, Outgoing, TransportLostError, describe_exit, log_size, tail_of
from helmsman.controller._transport.channel import Channel, ChannelTransport, Posted
from helmsman.rpc_server._process.guardian import read_record
from helmsman.rpc_server._process.oom import OomCount, oom_kills_since
from helmsman.rpc_server._process.pulse import find_page, observe
from helmsman.rpc_server._server.observer import ask_observer
from helmsman.rpc_server._server.ray_server import ChannelAddress, Greeting, RayHandleStore, RayReply
from helmsman.rpc_server._wire.auth import connect
from helmsman.rpc_server._wire.codec import Payload
from helmsman.rpc_server._wire.frames import RequestFrame, decode_reply, decode_request, encode_frame, numbered_request
from helmsman.rpc_server._wire.messages import Reply, Request, WorkerIdentity
from helmsman.rpc_server._wire.payload import from_wire
from helmsman.rpc_server._wire.segments import HAS_SEGMENTS, pack

log = logging.getLogger(__name__)

_RAY_CALL_S = 2.0
"""Longest wait for a call of Ray's while things are taken down; it is milliseconds unless the cluster's head is gone."""
_DEATH_S = 3.0
"""Longest wait for Ray to know that an actor which it was told to kill is dead."""
_REMAINS_S = 1.5
"""Longest wait for a guardian's record of a worker's end. The record takes milliseconds on an idle machine."""
_READ_REMAINS_S = 5.0
"""Longest wait for a task that reads the record on another node, where Ray may have to start a process for it."""
_PUT_IN_THREAD_BYTES = 1 << 20
_CONNECT_S = 3.0
"""How long connecting and proving may take before calls go by way of Ray instead."""
_PUBLISH_S = 60.0
"""Longest wait for a worker to copy what it keeps into Ray's object store."""
_SAMPLE = b"helmsman"


class ControllerStore(RayHandleStore):
    """What the script puts.

    Args:
        publish: asks the maker of a value to copy it into Ray's object store; returns its reference. Blocks.
    """

    def __init__(self, publish: Callable[[ResultHandle], Any]) -> None:
        super().__init__(in_segments=True)
        self._publish = publish

    def as_references(self, payload: Payload) -> Payload:
        """The same payload, whose handles any node can fetch. Blocks. Raises HandleLostError."""
        if not payload.handles:
            return payload
        handles = [
            msgspec.structs.replace(handle, location=self._reference(handle)) if type(handle.location) is bytes else handle
            for handle in payload.handles
        ]
        return Payload(payload.data, payload.buffers, handles)

    def _reference(self, handle: ResultHandle) -> Any:
        return self.publish(handle) if handle.worker_id == CONTROLLER else self._publish(handle)


class RayTransport(ChannelTransport):
    """Requests as actor tasks, each sent once (no task retries, no restarts)."""

    def __init__(
        self, actor: Any, place: Place, here: str, store: ControllerStore, embedded: EmbeddedRay | None = None
    ) -> None:
        super().__init__()
        self._made = actor
        self._ray = embedded
        self.place = place
        self._here = here
        self._worker_id = "a worker that starts"
        self.log_path = ""
        self.log_start = 0
        """Bytes that earlier processes wrote to the log."""
        self._pid = 0
        self._oom: OomCount | None = None
        self._reason: BaseException | None = None
        self._killed = False
        self._store = store
        self._watch: asyncio.Future[None] | None = None
        self._collecting: set[asyncio.Task[None]] = set()
        self._page: mmap.mmap | None = None
        """The worker's pulse, where it can be mapped here."""
        self._observer: Callable[[float], Awaitable[bytes]] | None = None
        """Asks the worker's observer within a limit in seconds; None where this process can observe the worker itself."""

    @property
    def _actor(self) -> Any:
        """The actor. Raises TransportLostError where its cluster is lost: a call to it would have Ray start another one."""
        if self._ray is not None and (loss := self._ray.loss) is not None:
            raise TransportLostError(str(loss)) from loss
        return self._made

    async def greet(self) -> Greeting:
        """The worker's first answer. Raises TransportLostError with the reason."""
        greeting: Greeting = await self._await(self._actor.greet.remote())
        self._pid, self._oom = greeting.pid, greeting.oom
        return greeting

    async def adopt(self, identity: WorkerIdentity, key: bytes, *, tls: bool) -> None:
        """Make it this worker, and open the direct channel to it.

        Args:
            identity: the worker's.
            key: for connections to this worker alone; without one there is no direct channel.
            tls: whether a channel between machines uses TLS.

        Raises: TransportLostError.
        """
        self._worker_id, self.log_path = identity.worker_id, identity.log_path
        self.log_start = log_size(identity.log_path)  # for an error until it answers, where its node is this one
        self.log_start = await self._await(self._actor.adopt.remote(identity))
        if HAS_SEGMENTS:
            self._page = find_page(self._pid, f"{identity.run_id}/{identity.worker_id}")
        if not key:
            return
        try:
            sock, shares_memory = await self._connect(key, tls)
        except (OSError, errors.ProtocolError) as error:
            log.warning(
                "%s: no direct connection to it (%s); its calls go by way of Ray, which takes longer", self._worker_id, error
            )
            return
        self._channel = Channel(
            sock,
            shares_memory=shares_memory,
            acknowledges=True,
            on_apart=self._collect_later,
            on_lost=self._collect_all,
        )
        self._watch = asyncio.ensure_future(self._watch_end())

    async def _connect(self, key: bytes, tls: bool) -> tuple[socket.socket, bool]:
        """The direct connection, and whether it shares memory. Raises OSError, ProtocolError, TransportLostError."""
        with pack([_SAMPLE]) if HAS_SEGMENTS else contextlib.nullcontext() as sample:
            location = None if sample is None else sample.location
            address: ChannelAddress = await self._await(self._actor.open_channel.remote(key, location, tls))
        if address.shares_memory:
            # It may be of another user, or in another network namespace, although it can map our memory.
            with contextlib.suppress(OSError, errors.ProtocolError):
                return await connect(address.where, key, _CONNECT_S), True
            address = await self._await(self._actor.open_channel.remote(key, None, tls))
        if address.observer_port:
            self._observer = functools.partial(ask_observer, (address.where[0], address.observer_port), key, tls=tls)
        return await connect(address.where, key, _CONNECT_S, tls=tls), False

    async def observe(self, limit_s: float) -> bytes:
        if self._page is not None:
            return await in_thread(observe, self._page, self._pid)
        if self._observer is None:
            return b""
        try:
            return await self._observer(limit_s)
        except (OSError, EOFError, errors.ProtocolError) as error:
            log.debug("%s: its observer did not answer: %s", self._worker_id, error)
            return b""

    def publish(self, handle: ResultHandle) -> Any:
        """The reference of a value that the worker keeps. Blocks. Raises HandleLostError."""
        try:
            reference = self._actor.publish.remote(handle)
            return blocking(functools.partial(ray.get, reference, timeout=_PUBLISH_S))[0]
        except ray.exceptions.GetTimeoutError as error:
            reason = f"its worker did not hand it over within {_PUBLISH_S:g} s"
            raise errors.HandleLostError(worker_id=handle.worker_id, handle_id=handle.id, reason=reason) from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, errors.HandleLostError):
                raise error.cause from None
            raise errors.ProtocolError(f"{self._worker_id}: the server in the worker failed: {error}") from error
        except (ray.exceptions.RayError, TransportLostError, errors.ClusterLostError) as error:
            reason = f"its worker has ended: {_reason_text(error)}"
            raise errors.HandleLostError(worker_id=handle.worker_id, handle_id=handle.id, reason=reason) from error

    async def _watch_end(self) -> None:
        """A connection to a node that vanishes does not end by itself; Ray tells of it."""
        try:
            await self._await(self._actor.live.remote())
        except (TransportLostError, errors.ProtocolError):
            if self._channel is not None:
                self._channel.close()

    async def pending(self) -> str:
        """Why its actor may not have started, as far as Ray tells."""
        state = await bounded(cluster_state.actor_state, self._actor._actor_id.hex())
        return f"Ray has it as {state or 'unknown'} on node {self.place.node}"

    def _collect_later(self, posted: Posted) -> None:
        """Ask by way of Ray for an answer that did not come by the channel."""
        task = asyncio.ensure_future(self._collect(posted))
        self._collecting.add(task)
        task.add_done_callback(self._collecting.discard)

    def _collect_all(self, lost: Sequence[Posted]) -> None:
        for posted in lost:
            self._collect_later(posted)

    async def _collect(self, posted: Posted) -> None:
        """One that never arrived is sent by way of Ray; it is refused if it still comes, so that this is the first time."""
        try:
            answer = await self._await(self._actor.collect.remote(posted.request_id))
            if answer is None:
                answer = await self._await(await self._sent_again(posted))
            else:
                self._actor.forget.remote([posted.request_id])
            reply, result = await self._fetched(answer)
        except Exception as error:  # noqa: BLE001 - handed to whoever awaits the answer
            posted.awaited.failed(error)
        else:
            posted.awaited.replied(reply, result)
        finally:
            posted.settle()

    async def _sent_again(self, posted: Posted) -> Any:
        """Send by way of Ray what the channel has lost. What cannot be sent is sent without its arguments, which is refused in
        its turn: the worker waits for every number."""
        _, frame = decode_request(numbered_request(posted.number, posted.body))
        try:
            assert frame.payload is not None
            return await bounded(self._remote, frame.request, from_wire(frame.payload), posted.number)
        except Exception:
            empty = numbered_request(posted.number, encode_frame(RequestFrame(frame.request)))
            getattr(self._actor, frame.request.verb.value).remote(empty)
            raise

    async def _send_otherwise(self, outgoing: Outgoing, number: int) -> Awaitable[tuple[Reply, Payload]]:
        if outgoing.is_small and not outgoing.payload.handles:
            message = numbered_request(number, outgoing.body())
            return self._answer(getattr(self._actor, outgoing.request.verb.value).remote(message))
        if outgoing.num_bytes >= _PUT_IN_THREAD_BYTES or outgoing.payload.handles:  # copied into the object store
            return self._answer(await bounded(self._remote, outgoing.request, outgoing.payload, number))
        return self._answer(self._remote(outgoing.request, outgoing.payload, number))

    def _remote(self, request: Request, payload: Payload, number: int) -> Any:
        message = numbered_request(number, encode_frame(RequestFrame(request)))
        return getattr(self._actor, request.verb.value).remote(message, self._store.as_references(payload))

    async def _answer(self, reference: Any) -> tuple[Reply, Payload]:
        return await self._fetched(await self._await(reference))

    async def _fetched(self, answer: RayReply) -> tuple[Reply, Payload]:
        if isinstance(answer, bytes):
            frame = decode_reply(answer)
            assert frame.payload is not None
            return frame.reply, from_wire(frame.payload)
        reply, payload = answer
        if isinstance(payload, ray.ObjectRef):
            payload = await self._await(payload)
        return reply, payload

    async def _await(self, reference: Any) -> Any:
        try:
            return await (reference if self._ray is None else self._ray.wait(reference))
        except errors.ClusterLostError as error:
            raise TransportLostError(str(error)) from error
        except ray.exceptions.RayTaskError as error:
            raise errors.ProtocolError(f"{self._worker_id}: the server in the worker failed: {error}") from error
        except ray.exceptions.RayError as error:
            self._reason = error
            raise TransportLostError(_reason_text(error)) from error

    async def ending(self) -> Ending:
        try:
            return await self._ending()
        except errors.ClusterLostError as loss:
            return Ending(
                f"was lost with the Ray that this scheduler started: {loss.cause}",
                log_tail=loss.log_tail,
                log_path=loss.log_path,
                aftermath="All workers of this scheduler are lost. Close it and start another; this process can do so.",
            )

    async def _ending(self) -> Ending:
        if self._ray is not None:
            self._ray.require()
        if self.place.node_id != self._here and (loss := await bounded(cluster_state.loss_of_node, self.place.node_id)):
            return Ending(f"was lost with its node: {loss}")
        record, num_oom_kills, tail = await self._remains()
        if self._ray is not None:
            self._ray.require()  # its workers end a moment before it, or after
        if record is None:
            cause = describe_exit(None, None)
            if isinstance(self._reason, ray.exceptions.OutOfMemoryError):
                cause = "was ended by Ray's memory monitor, because its node ran out of memory"
            return Ending(cause, log_tail=tail)
        code, number = record["exit_code"], record["exit_signal"]
        return Ending(describe_exit(code, number, num_oom_kills), code, number, tail)

    async def _remains(self) -> _Remains:
        """What the worker's guardian recorded, the OOM kills around it and the end of its log, read on the worker's node."""
        if self.place.node_id == self._here:
            return await in_thread(_read_remains, self.log_path, self._pid, self.log_start, self._oom)
        reader = ray.remote(num_cpus=0, max_retries=0)(_read_remains)
        there = reader.options(scheduling_strategy=placement.on_node(self.place.node_id))
        reference = there.remote(self.log_path, self._pid, self.log_start, self._oom)
        try:
            async with asyncio.timeout(_READ_REMAINS_S):
                remains: _Remains = await reference
                return remains
        except (TimeoutError, ray.exceptions.RayError) as error:
            log.warning("%s: the remains on its node could not be read: %s", self._worker_id, error)
            return None, 0, ""

    async def kill(self) -> None:
        if self._killed:
            return
        if self._channel is not None:
            self._channel.close()
        if self._ray is not None and self._ray.loss is not None:
            return
        with contextlib.suppress(TimeoutError, errors.ClusterLostError):
            await bounded(lambda: ray.kill(self._made, no_restart=True), limit_s=_RAY_CALL_S)
        with contextlib.suppress(TransportLostError, TimeoutError):
            async with asyncio.timeout(_DEATH_S):
                await self._await(self._actor.greet.remote())  # fails as soon as the actor is known to be dead
        self._killed = True


def _reason_text(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


_Remains = tuple[dict[str, int | None] | None, int, str]


def _read_remains(log_path: str, pid: int, log_start: int, before: OomCount | None) -> _Remains:
    """The record of a worker's end, for which its guardian needs a moment, OOM kills since ``before``, and its log's tail."""
    from helmsman.rpc_server._process.guardian import wait_until

    wait_until(lambda: read_record(log_path, pid) is not None, _REMAINS_S)
    return read_record(log_path, pid), oom_kills_since(before), tail_of(log_path, start=log_start)
