"""A run's control socket: answers other processes of the same user while the script runs.

The kernel removes its abstract address however the script ends. Each side checks by SO_PEERCRED
that the other belongs to this user. The end of a message is the end of its sender's stream.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from helmsman.api.errors import HelmsmanError

log = logging.getLogger(__name__)

_MOST_CLIENTS = 8
_REQUEST_BYTES = 1 << 16
_SILENT_S = 5.0
"""A client that sends or reads nothing for this long is dropped; more clients wait for that."""
_BESIDE_S = 4.0
"""Longest wait for an answer beyond the query's limit: a blocked event loop is noticed late."""


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """A question to a run, or an action."""

    kind: Literal["snapshot", "stacks", "files", "drain", "resume", "scale", "kill"]
    role: str | None = None
    """Only this role; None for all."""
    reports: bool = False
    """Whether a snapshot includes the processes' reports about themselves."""
    target: str = ""
    """Worker id or role of an action; worker whose files are wanted."""
    node: str = ""
    """Node with these files."""
    number: int = 0
    """Number of replicas for 'scale'."""
    limit_s: float = 5.0


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a query that failed."""

    refused: str


class ControlSocket:
    """Answers queries on the Unix socket of a run, on a few threads of its own.

    ``answer`` is called on these threads; msgspec must be able to encode its result.

    Raises:
        OSError: The socket cannot be created.
    """

    def __init__(self, run_id: str, answer: Callable[[Query], Any]) -> None:
        self._answer = answer
        self._is_closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(_address(run_id))
            self._listener.listen(_MOST_CLIENTS)
            for _ in range(_MOST_CLIENTS):
                threading.Thread(target=self._accept, name="helmsman-query", daemon=True).start()
        except BaseException:
            self._listener.close()
            raise
        os.register_at_fork(after_in_child=self._listener.close)

    def close(self) -> None:
        """Stop answering. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # it is closed, or too many files are open
                time.sleep(0.1)
                continue
            try:
                with peer, peer.makefile("rb") as stream:
                    peer.settimeout(_SILENT_S)
                    if _is_own(peer):
                        query = msgspec.msgpack.decode(stream.read(_REQUEST_BYTES), type=Query)
                        peer.sendall(self._answered(query))
            except (OSError, msgspec.MsgspecError, RecursionError) as error:
                log.debug("a query of the control socket ended: %s", error)

    def _answered(self, query: Query) -> bytes:
        try:
            return msgspec.msgpack.encode(self._answer(query))
        except Exception as error:  # noqa: BLE001 - reported to the client
            kind = "" if isinstance(error, HelmsmanError) else f"{type(error).__name__}: "
            return msgspec.msgpack.encode(Refusal(refused=f"{kind}{error}"))


def ask(run_id: str, query: Query) -> bytes:
    """Send a query to a run on this machine; returns the answer in msgpack, b'' if the run ended.

    Raises:
        OSError: The run has no socket, did not answer a few seconds after ``query.limit_s``, or
            another user's process listens there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(query.limit_s + _BESIDE_S)
        try:
            peer.connect(_address(run_id))
        except ConnectionRefusedError as error:
            raise ConnectionRefusedError(f"run {run_id} has no control socket here") from error
        if not _is_own(peer):
            raise PermissionError(f"the control socket of run {run_id} belongs to another user")
        peer.sendall(msgspec.msgpack.encode(query))
        peer.shutdown(socket.SHUT_WR)
        with peer.makefile("rb") as stream:
            return stream.read()


def _address(run_id: str) -> str:
    """Return the abstract address of a run's socket; raises OSError where there are none."""
    if sys.platform != "linux":
        raise OSError("a control socket needs Linux")
    return f"\0helmsman/{os.geteuid()}/{run_id}"


def _is_own(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.geteuid())
