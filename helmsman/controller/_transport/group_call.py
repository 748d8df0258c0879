"""GroupPendingCall: one request of a Fanout."""

from __future__ import annotations

from helmsman.api.fan_out import Fanout
from helmsman.controller._aio.event_loop import run_in_executor
from helmsman.controller._transport.client import PendingCall, WorkerClient
from helmsman.rpc_server._wire.codec import Payload, decode, is_plain
from helmsman.rpc_server._wire.wire import Outgoing


class GroupPendingCall(PendingCall):
    """One request of a group, which enforces a common deadline."""

    __slots__ = ("_group", "_is_answered", "_worker_id")

    def __init__(
        self, client: WorkerClient, outgoing: Outgoing, group: Fanout, worker_id: str
    ) -> None:
        self._group = group
        self._is_answered = False
        self._worker_id = worker_id  # with colocation the client has the target role's id
        group.pending[worker_id] = self
        super().__init__(client, outgoing, group.started)

    def cancel(self) -> None:
        """The caller no longer waits; a sent request continues."""

    def _succeeded(self, payload: Payload) -> bool:
        if is_plain(payload):
            self._group.succeeded(self._worker_id, decode(payload))
        else:
            self._is_answered = True
            self._client.in_background(self._decode(payload))
        return True

    async def _decode(self, payload: Payload) -> None:
        """Unpickle a result off the loop, since it may be large and import modules."""
        try:
            value = await run_in_executor(decode, payload)
        except Exception as error:  # noqa: BLE001 - handed to the caller that awaits the answer
            self._group.failed(self._worker_id, error)
        else:
            self._group.succeeded(self._worker_id, value)

    def give_up(self, limit_s: float, source: str) -> None:
        if not self._is_answered:
            # A rank that has begun its call, or may have, could wait for this one in a collective.
            group = self._group
            is_safe = len(group.pending) == 1 or all(
                call.is_waiting for call in group.pending.values()
            )
            self._may_withdraw = is_safe and not group.results
            super().give_up(limit_s, source)

    def _fail(self, error: Exception) -> None:
        self._group.failed(self._worker_id, error)
