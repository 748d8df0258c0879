"""EngineHost: replies that cannot be carried, and calls that have not begun."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from helmsman.api.engines import InferenceEngine
from helmsman.api.errors import EngineCallError
from helmsman.rpc_server._host.handles import SegmentStore
from helmsman.rpc_server._host.host import EngineHost
from helmsman.rpc_server._wire.codec import Payload, decode, encode
from helmsman.rpc_server._wire.messages import CallState, Reply, Request, Verb, WorkerIdentity
from tests.contract.engines import Counter
from tests.controller.engines import CountingRollout

LIMIT_S = 30.0


class FullStore(SegmentStore):
    """Has no room left, which it says as Ray does: with an error of its own."""

    def put(self, handle_id: str, payload: Payload) -> Any:
        raise RuntimeError("the object store is full")


class Unsure(CountingRollout, InferenceEngine):  # type: ignore[misc]
    """Cannot even say whether it can serve."""

    def failure(self) -> str | None:
        raise LookupError("who knows?")


class Blocking:
    """Occupies its thread, or its event loop, until the test releases it."""

    started = threading.Semaphore(0)
    released = threading.Semaphore(0)

    def __init__(self) -> None:
        Blocking.started, Blocking.released = threading.Semaphore(0), threading.Semaphore(0)
        self.noted: list[str] = []

    def block(self) -> None:
        """Occupy the engine thread."""
        self.started.release()
        self.released.acquire(timeout=LIMIT_S)

    async def async_block(self) -> None:
        """Occupy the event loop."""
        self.block()

    def note(self, name: str) -> list[str]:
        """Note that this call ran."""
        self.noted.append(name)
        return self.noted

    async def async_note(self, name: str) -> list[str]:
        """Note that this call ran."""
        return self.note(name)


class Asked:
    """A host and the answers to what it is asked."""

    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self.answers: dict[int, queue.SimpleQueue[tuple[bool, Any]]] = {}

    def begin(self, request_id: int, verb: Verb, arguments: Any, method: str = "") -> None:
        """Send a request."""
        answer = self.answers[request_id] = queue.SimpleQueue()
        request = Request(request_id, verb, "engine", method)
        self.host.handle(request, encode(arguments), lambda reply, payload: answer.put((reply.ok, decode(payload))))

    def answer(self, request_id: int) -> tuple[bool, Any]:
        """Wait for the answer to a request."""
        return self.answers[request_id].get(timeout=LIMIT_S)

    def ask(self, request_id: int, verb: Verb, arguments: Any, method: str = "") -> Any:
        """The result of a request."""
        self.begin(request_id, verb, arguments, method)
        is_ok, result = self.answer(request_id)
        assert is_ok, result
        return result


@pytest.fixture
def asked() -> Iterator[Asked]:
    """A host with an engine of class Blocking."""
    identity = WorkerIdentity(run_id="run", worker_id="a/0", role="a", rank=0, node="127.0.0.1", log_path="")
    host = EngineHost(identity, SegmentStore(), seeding=False)
    host.engine_thread.start("engine")
    made = Asked(host)
    made.ask(1, Verb.CREATE_ENGINE, (Blocking, (), {}))
    try:
        yield made
    finally:
        Blocking.released.release(2)
        host.close()
        host.join()


@pytest.mark.parametrize("prefix", ["", "async_"])
def test_call_that_has_not_begun_is_withdrawn(asked: Asked, prefix: str) -> None:
    asked.begin(2, Verb.CALL, ((), {}), f"{prefix}block")
    assert Blocking.started.acquire(timeout=LIMIT_S)
    asked.begin(3, Verb.CALL, (("withdrawn",), {}), f"{prefix}note")
    (seen,) = asked.ask(4, Verb.INSPECT, ([3],)).values()
    assert (seen.state, seen.running) == ("waiting", f"engine.{prefix}block")
    cancelled: CallState = asked.ask(5, Verb.CANCEL, (3,))
    assert (cancelled.state, cancelled.running) == ("withdrawn", f"engine.{prefix}block")
    assert "self.released.acquire" in cancelled.stack
    assert not asked.answer(3)[0], "the transport can forget it"
    Blocking.released.release()
    assert asked.answer(2) == (True, None)
    assert asked.ask(6, Verb.CALL, (("later",), {}), f"{prefix}note") == ["later"]


@pytest.mark.parametrize("prefix", ["", "async_"])
def test_closed_host_begins_no_queued_call(asked: Asked, prefix: str) -> None:
    asked.begin(2, Verb.CALL, ((), {}), f"{prefix}block")
    assert Blocking.started.acquire(timeout=LIMIT_S)
    asked.begin(3, Verb.CALL, ((), {}), f"{prefix}block")
    asked.begin(4, Verb.CALL, (("too late",), {}), f"{prefix}note")
    Blocking.released.release()
    assert Blocking.started.acquire(timeout=LIMIT_S), "the loop has begun a round with both calls"
    engine = asked.host._engines["engine"]
    thread = asked.host.engine_thread.thread if not prefix else asked.host._loop.thread
    asked.host.close()
    Blocking.released.release()
    assert thread is not None
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert engine.noted == []
    assert asked.answers[4].empty(), "its caller learns of the worker's end"


def test_health_is_answered_though_an_engine_cannot_say_whether_it_serves() -> None:
    identity = WorkerIdentity(run_id="run", worker_id="a/0", role="a", rank=0, node="127.0.0.1", log_path="")
    host = EngineHost(identity, SegmentStore(), seeding=False)
    host.engine_thread.start("engine")
    replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
    try:
        request = Request(1, Verb.CREATE_ENGINE, "engine", "", False)
        host.handle(request, encode((Unsure, (), {})), lambda reply, _: replies.put(reply))
        assert replies.get(timeout=LIMIT_S).ok
        assert host.health().failed_engines == {"engine": "engine.failure raised LookupError: who knows?"}
    finally:
        host.close()


@pytest.mark.parametrize("method", ["add", "async_add"])
def test_a_result_for_which_there_is_no_room_costs_its_call_alone(method: str) -> None:
    identity = WorkerIdentity(run_id="run", worker_id="a/0", role="a", rank=0, node="127.0.0.1", log_path="")
    host = EngineHost(identity, FullStore(), seeding=False)
    host.engine_thread.start("engine")
    replies: queue.SimpleQueue[tuple[Reply, Payload]] = queue.SimpleQueue()

    def ask(verb: Verb, method: str, arguments: Any, *, keep: bool = False) -> tuple[bool, Any]:
        host.handle(Request(1, verb, "engine", method, keep), encode(arguments), lambda *answer: replies.put(answer))
        reply, payload = replies.get(timeout=LIMIT_S)
        return reply.ok, decode(payload)

    try:
        assert ask(Verb.CREATE_ENGINE, "", (Counter, (), {})) == (True, None)
        is_ok, error = ask(Verb.CALL, method, ((), {}), keep=True)
        assert not is_ok
        assert isinstance(error, EngineCallError)
        assert "the object store is full" in str(error)
        assert ask(Verb.CALL, method, ((), {})) == (True, 2)
    finally:
        host.close()
