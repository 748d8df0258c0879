"""EngineHost where what carries its replies fails."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from helmsman.api.engines import InferenceEngine
from helmsman.api.errors import EngineCallError
from helmsman.rpc_server._host.handles import SegmentStore
from helmsman.rpc_server._host.host import EngineHost
from helmsman.rpc_server._wire.codec import Payload, decode, encode
from helmsman.rpc_server._wire.messages import Reply, Request, Verb, WorkerIdentity
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
