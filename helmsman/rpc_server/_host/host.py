"""EngineHost: the engines of one worker, independent of the transport.

An adapter passes requests to the host and delivers its replies.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from helmsman._process.environment import Environment, follow_thread_count
from helmsman._process.ports import PortLeases
from helmsman._process.pulse import Pulse
from helmsman._process.recorder import CallLog, Recorder, read_files
from helmsman._process.upkeep import Output, Upkeep
from helmsman._wire.codec import Payload, decode, encode
from helmsman._wire.messages import (
    Reply,
    Request,
    Verb,
    WorkerConfig,
    WorkerIdentity,
    dotted,
)
from helmsman._wire.remote_errors import remote_error
from helmsman.api import errors
from helmsman.api.environment import EnvironmentVariable
from helmsman.api.platforms import current_platform
from helmsman.api.scheduler import EngineSpec, ResultHandle, WorkerHealth
from helmsman.api.workers import InstanceNodes, WorkerContext, within
from helmsman.rpc_server._host import connectivity
from helmsman.rpc_server._host.call_states import CallStates
from helmsman.rpc_server._host.engine_calls import (
    arguments_of,
    construct,
    import_engine,
    is_pending,
    settled,
)
from helmsman.rpc_server._host.engine_registry import EngineRegistry
from helmsman.rpc_server._host.examination import examine
from helmsman.rpc_server._host.handles import HandleStore, keep
from helmsman.rpc_server._host.journal import WorkerJournal
from helmsman.rpc_server._host.progress import Connections
from helmsman.rpc_server._host.threads import EngineLoop, EngineThread, all_stacks

ReplyFn = Callable[[Reply, Payload], None]


class EngineHost:
    """Holds named engines and answers requests.

    Synchronous engine methods run one after another on the engine thread, async ones on an event
    loop. Control verbs are answered on the calling thread, so a long call never delays them. The
    host is the process boundary: it catches every exception of an engine.

    Args:
        identity: The worker.
        store: Keeps results that callers get as handles.
        seeding: Whether to seed libraries; False in the controller's own process.
        pulse: Lets others observe this process while it cannot answer; None in the controller's
            own process.
        title_end: Appended to the process titles, which only a process with a pulse has.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        store: HandleStore,
        *,
        seeding: bool = True,
        pulse: Pulse | None = None,
        title_end: str = "",
        nodes: InstanceNodes | None = None,
    ) -> None:
        self.identity = identity
        self._nodes = nodes
        self._recorder = Recorder(identity.worker_id)
        self.engine_thread = EngineThread(
            CallLog(self._recorder, pulse.thread_call, is_serial=True) if pulse else None
        )
        self.on_shutdown: Callable[[], None] = lambda: None
        self.ends_at: float | None = None
        """time.monotonic() at which this process ends; None unless it was sent SIGTERM."""
        self._store = store
        self._seeding = seeding
        self._seed: int | None = None
        self._loop = EngineLoop(
            f"{identity.worker_id} async",
            CallLog(self._recorder, pulse.loop_call, is_serial=False) if pulse else None,
        )
        self._call_states = CallStates(self.engine_thread, self._loop)
        # In the controller's own process, the script has connections, too.
        self._connections = Connections() if pulse is not None else None
        self._ports = PortLeases()
        # Without seeding this is the driver's own process.
        self._environment = Environment("node" if seeding else "driver")
        self._listener = connectivity.PortListener()
        self._journal = WorkerJournal(identity, title_end, self._recorder)
        self._upkeep = Upkeep(functools.partial(self._journal.say, "%s"))
        self._engines = EngineRegistry(identity.worker_id, self._loop, self._journal.say)
        self._num_calls = 0
        self._is_closed = False
        self._pid = os.getpid()
        if pulse is not None:
            self._keep_files()
            pulse.start(self._describe)

    def _keep_files(self) -> None:
        """Keep the worker's log, if it has one, and the flight recorder beside it."""
        log_path, run_id = self.identity.log_path, self.identity.run_id
        if log_path:
            self._recorder.persist_at(os.path.splitext(log_path)[0], run_id)
            self._upkeep.add(f"its log {log_path}", Output(log_path, run_id).renew)
            self._upkeep.add("its flight recorder", self._recorder.renew)
            self._upkeep.start()

    def _describe(self) -> bytes:
        self._recorder.beat()
        return msgspec.msgpack.encode(self._journal.beat(self._activity()))

    # --- requests ---------------------------------------------------------------------------------

    def handle(self, request: Request, payload: Payload, reply: ReplyFn) -> None:
        """Answer a request, without waiting for engine code.

        Args:
            request: The request.
            payload: Its packed arguments.
            reply: Called exactly once, from any thread.
        """
        try:
            if self._call_states.is_cancelled(request.id):
                self._decline(request, reply)
            elif request.verb is Verb.CALL:
                self._begin_call(request, payload, reply)
            elif request.verb is Verb.CREATE_ENGINE:
                self._begin_create(request, payload, reply)
            elif request.verb is Verb.DESTROY:
                destroy = functools.partial(self._engines.destroy, *decode(payload))
                work = functools.partial(self._answer, request, reply, destroy)
                self.engine_thread.submit(
                    request.id, "destroy", work, functools.partial(self._decline, request, reply)
                )
            elif request.verb is Verb.CHECK_CONNECT:
                # A thread of its own, since it waits for another machine.
                reach = functools.partial(connectivity.reach, *decode(payload))
                threading.Thread(
                    target=self._answer, args=(request, reply, reach), name="reach", daemon=True
                ).start()
            else:
                self._answer(request, reply, lambda: self._control(request, payload))
                if request.verb is Verb.SHUTDOWN:
                    self.on_shutdown()
        # Process boundary: looking up a method runs the engine's __getattr__.
        except BaseException as error:  # noqa: BLE001
            self._fail(request, reply, error)

    def close(self) -> None:
        """Stop the host's threads and release its ports.

        Engines are not destroyed, calls in flight get no reply, and pending calls do not begin.
        """
        self._is_closed = True
        self._upkeep.stop()
        self.engine_thread.waiting.drop_all()
        self.engine_thread.stop()
        self._loop.stop()
        self._listener.close()
        self._ports.close()

    def join(self) -> None:
        """After close, wait up to two seconds for calls in flight, so that the process can exit."""
        self._loop.join()

    def set_environment(self, variables: Sequence[EnvironmentVariable]) -> None:
        """Set variables of this process, before engines are created, and record their sources."""
        self._environment.set(variables)
        if any(variable.name == "OMP_NUM_THREADS" for variable in variables):
            self.engine_thread.submit(object(), "follow_thread_count", follow_thread_count)

    def _answer(self, request: Request, reply: ReplyFn, work: Callable[[], Any]) -> None:
        try:
            result = work()
        # Process boundary: every exception of a request is returned as its error.
        except BaseException as error:  # noqa: BLE001
            self._fail(request, reply, error)
        else:
            self._send_result(request, reply, result)

    def _fail(self, request: Request, reply: ReplyFn, error: BaseException) -> None:
        ours = (
            error
            if isinstance(error, errors.HelmsmanError)
            else remote_error(self.identity, request, error)
        )
        reply(Reply(request.id, False), encode(ours))

    def _decline(self, request: Request, reply: ReplyFn) -> None:
        """Reply to a cancelled request that will not begin, so that the transport can forget it."""
        reply(Reply(request.id, False), encode(errors.HelmsmanError("withdrawn")))

    # --- control verbs ----------------------------------------------------------------------------

    def _control(self, request: Request, payload: Payload) -> Any:
        arguments: tuple[Any, ...] = decode(payload)
        match request.verb:
            case Verb.HEALTH:
                return msgspec.msgpack.encode(self.health())
            case Verb.STACKS:
                return all_stacks()
            case Verb.EXAMINE:
                log_dir = os.path.dirname(self.identity.log_path)
                return examine(
                    self.identity.node,
                    log_dir,
                    self.engine_thread,
                    self._loop,
                    self._connections,
                )
            case Verb.FILES:
                return read_files(os.path.dirname(self.identity.log_path), arguments[0])
            case Verb.CONFIGURE:
                return self._configure(*arguments)
            case Verb.SET_ENV:
                return self.set_environment(
                    [
                        EnvironmentVariable(name, value, "set_worker_env")
                        for name, value in arguments[0].items()
                    ]
                )
            case Verb.ENVIRONMENT:
                return self._environment.describe()
            case Verb.LEASE_PORTS:
                return self._ports.lease(arguments[0])
            case Verb.PROBE_LISTEN:
                return self._listener.listen(*arguments)
            case Verb.INSPECT:
                return self._call_states.inspect(arguments[0])
            case Verb.CANCEL:
                return self._call_states.cancel(arguments[0])
            case Verb.RELEASE:
                return self._store.drop(arguments[0])
            case Verb.SHUTDOWN:
                return self._journal.say("ends: its scheduler has requested a shutdown")
        raise errors.ProtocolError(
            f"{self.identity.worker_id} does not support the verb {request.verb!r}"
        )

    def health(self) -> WorkerHealth:
        return msgspec.structs.replace(
            self._activity(),
            cpu_s=time.process_time(),
            rss_bytes=_resident_bytes(),
            failed_engines=self._engines.failures(),
        )

    def _activity(self) -> WorkerHealth:
        """Return the part of its health that needs no engine code and no system call."""
        running = self.engine_thread.occupant
        return WorkerHealth(
            worker_id=self.identity.worker_id,
            pid=os.getpid(),
            node=self.identity.node,
            engines=self._engines.types(),
            running=running.name if running else None,
            running_s=time.monotonic() - running.since if running else None,
            num_queued=len(self.engine_thread.waiting),
            async_running=self._loop.counts(),
            num_calls=self._num_calls,
            ends_in_s=None if self.ends_at is None else max(0.0, self.ends_at - time.monotonic()),
            failure=self._loop.failure,
        )

    def _configure(self, config: WorkerConfig) -> None:
        self.set_environment(config.environment)
        if config.grant is not None:
            current_platform.expect(config.grant)
        if self._seeding:
            self._environment.set_interface(self.identity.node)
            digest = hashlib.sha256(f"{config.seed}/{config.role}/{config.rank}".encode()).digest()
            self._seed = int.from_bytes(digest[:4], "little")
            current_platform.seed(self._seed)
        self._journal.started(config, self._pid)

    def _seed_libraries(self) -> None:
        """Seed random generators once their libraries are imported.

        Importing torch only for this would cost a second.
        """
        if self._seed is None:
            return
        current_platform.seed(self._seed)
        self._seed = None  # a later engine must not repeat the first one's random numbers

    # --- engines ----------------------------------------------------------------------------------

    def _begin_create(self, request: Request, payload: Payload, reply: ReplyFn) -> None:
        name = str(request.engine_name)
        self._engines.claim(name)

        def withdrawn() -> None:
            self._engines.release(name)
            self._decline(request, reply)

        self.engine_thread.submit(
            request.id,
            dotted(name, "__init__"),
            lambda: self._answer(
                request, reply, lambda: self._create_engine(request, name, payload)
            ),
            withdrawn,
        )

    def _create_engine(self, request: Request, name: str, payload: Payload) -> None:
        try:
            engine, args, kwargs = self._load(request, payload)
            spec = engine if isinstance(engine, EngineSpec) else EngineSpec(target=engine)
            if spec.env:
                self.set_environment(
                    [
                        EnvironmentVariable(key, value, "EngineSpec.env")
                        for key, value in spec.env.items()
                    ]
                )
            engine_type: Any = spec.target
            if isinstance(engine_type, str):
                engine_type = import_engine(self.identity.worker_id, name, engine_type)
            self._seed_libraries()
            named = {**spec.kwargs, **kwargs}
            me = WorkerContext(
                worker_id=self.identity.worker_id,
                node=self.identity.node,
                ports=self._ports.leased,
                nodes=self._nodes,
                engines=self._engines.by_name(),
            )
            with within(me):
                made = self._run_engine_code(
                    request, lambda: construct(engine_type, spec.rank_info, args, named)
                )
            self._engines.add(name, made)
            self._journal.created(name, made)
        finally:
            self._engines.release(name)

    def _run_engine_code(self, request: Request, work: Callable[[], Any]) -> Any:
        """Run engine code; any exception becomes our error about the engine, with the traceback."""
        try:
            return work()
        except BaseException as error:
            raise remote_error(self.identity, request, error) from error
        finally:
            self._end_forked_child(request)

    def _end_forked_child(self, request: Request) -> None:
        """End this process if an engine method has forked it and returned or raised in the child.

        The child has copies of the queued calls and of the connections: it would execute calls a
        second time, and answer them.
        """
        if os.getpid() != self._pid:
            name = dotted(
                request.engine_name or self.identity.worker_id, request.method or request.verb.value
            )
            print(
                f"helmsman: {name} forked this process and did not end the child with os._exit(); "
                "the child ends here",
                file=sys.stderr,
            )
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    # --- calls ------------------------------------------------------------------------------------

    def _begin_call(self, request: Request, payload: Payload, reply: ReplyFn) -> None:
        if request.engine_name is None:
            request = msgspec.structs.replace(request, engine_name=self.identity.worker_id)
        engine, method = self._engines.find(request)
        name = dotted(request.engine_name, request.method)
        self._num_calls += 1

        async def finish(result: Any) -> None:
            try:
                try:
                    result = await settled(result)
                finally:
                    self._end_forked_child(request)
                self._journal.called(engine, request, result)
            except BaseException as error:  # noqa: BLE001 - the process boundary, as in _answer
                if self._is_closed:
                    # Not the engine's reply: the transport reports the worker's end to the caller.
                    return
                reply(Reply(request.id, False), encode(remote_error(self.identity, request, error)))
            else:
                self._send_result(request, reply, result)

        async def run_async() -> None:
            try:
                args, kwargs = self._load(request, payload)
            except errors.HelmsmanError as error:
                self._fail(request, reply, error)
            else:
                await finish(method(*args, **kwargs))

        def run() -> None:
            try:
                args, kwargs = arguments_of(
                    engine, lambda: self._load(request, payload), self.identity.worker_id, request
                )
                result = self._run_engine_code(request, lambda: method(*args, **kwargs))
                if is_pending(result):  # the engine thread is free for the next call
                    self._loop.submit(request.id, name, functools.partial(finish, result))
                    return
                self._journal.called(engine, request, result)
            except BaseException as error:  # noqa: BLE001 - the process boundary, as in _answer
                self._fail(request, reply, error)
            else:
                self._send_result(request, reply, result)

        withdrawn = functools.partial(self._decline, request, reply)
        if inspect.iscoroutinefunction(method):
            self._loop.submit(request.id, name, run_async, withdrawn)
        else:
            self.engine_thread.submit(request.id, name, run, withdrawn)

    def _load(self, request: Request, payload: Payload) -> Any:
        """Unpack the arguments of a request, with handles replaced by their values."""
        try:
            return decode(payload, resolve=lambda handle: decode(self._store.fetch(handle)))
        except errors.CodecError as error:
            raise self._refusal(errors.ArgumentNotLoadableError, request, error) from error

    def _refusal(
        self, kind: type[errors.HelmsmanError], request: Request, error: errors.CodecError
    ) -> errors.HelmsmanError:
        return kind(
            worker_id=self.identity.worker_id,
            engine_name=request.engine_name,
            method=request.method or request.verb.value,
            path=error.path,
            value_type=error.value_type,
            reason=error.reason,
        )

    # --- replies ----------------------------------------------------------------------------------

    def _send_result(self, request: Request, reply: ReplyFn, result: Any) -> None:
        if request.discard:
            result = None
        kept: ResultHandle | None = None
        try:
            payload = encode(result, root="result")
            if request.keep and result is not None:
                kept = keep(self._store, self.identity.worker_id, payload, result)
                payload = encode(kept)
            reply(Reply(request.id, True), payload)
        # No memory is left to keep or send it, in segments or Ray's store.
        except Exception as error:  # noqa: BLE001
            if kept is not None:
                self._store.drop(kept.id)  # no caller gets its handle
            if isinstance(error, errors.CodecError):
                failure = self._refusal(errors.ResultNotSerializableError, request, error)
            else:
                failure = remote_error(self.identity, request, error)
            self._fail(request, reply, failure)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
