"""ClusterDesk: calls a Cluster on behalf of its handles in other processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from helmsman._base.tls import server_tls, uses_tls
from helmsman.api.closing import Closing
from helmsman.api.dispatch import MethodSpec
from helmsman.api.errors import HelmsmanError, ProtocolError
from helmsman.api.worker_group import GroupFuture, GroupMethod, Options
from helmsman.controller._worker_groups.calls_by_name import CallsByName
from helmsman.rpc_server._host.host import ReplyFn
from helmsman.rpc_server._server.channel import ChannelServer, listen_abstract, listen_tcp
from helmsman.rpc_server._wire.codec import Payload, decode, encode
from helmsman.rpc_server._wire.messages import Reply, Request
from helmsman.rpc_server.ports import port_range

_ANSWER_THREADS = 4


class GroupCall(msgspec.Struct, frozen=True):
    """One call of a handle; its arguments are sent beside it."""

    method: str | MethodSpec
    """A name, called on ``ranks``; or a declaration, which determines the ranks."""
    ranks: Sequence[int]
    timeout: float | None


class DeskAddress(msgspec.Struct, frozen=True):
    """Address at which a desk listens, and the key of its connections."""

    where: str | tuple[str, int]
    key: bytes
    tls: bool
    shares_memory: bool
    """Whether only processes of the controller's machine can connect."""

    def __repr__(self) -> str:
        return f"<DeskAddress {self.where!r}>"


class ClusterDesk(Closing):
    """Listens for the handles of a cluster, and calls it for them.

    Args:
        cluster: The cluster.
        address: Address of this machine for handles on any machine; None for handles on this
            machine alone.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(self, cluster: CallsByName[Any], address: str | None) -> None:
        self._cluster = cluster
        self._answers = concurrent.futures.ThreadPoolExecutor(_ANSWER_THREADS, "cluster handles")
        key, tls = secrets.token_bytes(32), None
        if shares_memory := address is None and sys.platform == "linux":
            listener = listen_abstract()
        else:
            first, last = port_range(os.environ)
            listener = listen_tcp(address or "127.0.0.1", range(first, last + 1))
            tls = server_tls() if address is not None and uses_tls(os.environ) else None
        where = listener.getsockname()
        self.address = DeskAddress(
            where.decode() if isinstance(where, bytes) else where[:2],
            key,
            tls is not None,
            shares_memory,
        )
        self._server = ChannelServer(listener, key, self, shares_memory=shares_memory, tls=tls)
        self._server.start()

    def handle(self, request: Request, payload: Payload, reply: ReplyFn) -> None:
        """Begin a call and answer it later. Called in the order of each handle's calls."""

        def answer(future: GroupFuture[Any]) -> None:
            self._answers.submit(self._answer, request, future, reply)

        try:
            call: GroupCall
            call, (args, kwargs) = decode(payload)
            if isinstance(call.method, str):
                future: GroupFuture[Any] = self._cluster.execute_on_async(
                    call.ranks, call.method, *args, timeout=call.timeout, **kwargs
                )
            else:
                method = GroupMethod[..., Any](self._cluster, call.method, Options(call.timeout))
                future = method.submit(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the caller's
            reply(Reply(request.id, False), _encoded(error))
        else:
            future.add_done_callback(answer)

    def _answer(self, request: Request, future: GroupFuture[Any], reply: ReplyFn) -> None:
        try:
            result = encode(future.result())
            reply(Reply(request.id, True), result)
        except Exception as error:  # noqa: BLE001 - the caller's
            reply(Reply(request.id, False), _encoded(error))

    def close(self) -> None:
        """Accept no further handles; begun calls are still answered. Idempotent."""
        self._server.close()
        self._answers.shutdown(wait=False)


def _encoded(error: Exception) -> Payload:
    """Encode an error; one that cannot be pickled becomes its text."""
    with contextlib.suppress(Exception):
        return encode(error)
    return encode(ProtocolError(f"{type(error).__name__}: {error}"))


def address_for_others(addresses: Collection[str]) -> str | None:
    """Return the address of this machine in a cluster of machines; None if it is the only one.

    Args:
        addresses: Addresses of all nodes.

    Raises:
        HelmsmanError: None of them is this machine's.
    """
    own = {address for address in addresses if _is_own(address)}
    if own.issuperset(addresses):
        return None
    if not own:
        raise HelmsmanError(
            f"this machine has none of the addresses of the cluster's nodes, which are "
            f"{', '.join(sorted(addresses))}; pass the address at which these nodes reach this "
            "machine: handle(address=...)"
        )
    return min(own)


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe, contextlib.suppress(OSError):
        probe.bind((address, 0))
        return True
    return False
