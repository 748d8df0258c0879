"""Accepts connections and lets nobody say anything before he has proved that he belongs to the run."""

from __future__ import annotations

import abc
import os
import socket
import sys
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

from helmsman.rpc_server.proof import PROOF_LIMIT_S, prove_as_server

_MAX_UNPROVED = 32
"""Connections that may be proving themselves at a time; more are closed at once."""


class ProvedServer(abc.ABC):
    """Serves each connection on a thread of its own, once its peer has proved itself.

    Args:
        listener: a listening socket, which close() closes.
        key: the run's key.
    """

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._key = key
        self._unproved = threading.Semaphore(_MAX_UNPROVED)
        self._listener = listener

    @abc.abstractmethod
    def _serve_requests(self, connection: Connection, peer: socket.socket) -> None:
        """Serve a proved connection until it ends."""

    def _may_try(self, peer: socket.socket) -> bool:
        """Whether a peer may begin to prove itself."""
        return True

    def serve_forever(self) -> None:
        """Accept until the listener is closed."""
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            if not self._may_try(peer) or not self._unproved.acquire(blocking=False):
                peer.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(peer,), name="connection", daemon=True).start()
            except RuntimeError as error:  # the limit on threads: this connection's loss, and later ones may be served
                print(f"helmsman: closed a connection: no thread can be started for it ({error})", file=sys.stderr)
                peer.close()
                self._unproved.release()

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def _serve(self, peer: socket.socket) -> None:
        """One connection. A peer that breaks the protocol loses its connection only."""
        # A silent peer is cut off from outside: reads of a Connection have no deadline of their own.
        cut = threading.Timer(PROOF_LIMIT_S, _shutdown, args=(peer,))
        cut.daemon = True
        try:
            cut.start()
            connection = Connection(os.dup(peer.fileno()))
            prove_as_server(connection, self._key)
        except (AuthenticationError, EOFError, OSError, ValueError, AssertionError, RuntimeError) as error:
            print(f"helmsman: refused a connection that did not prove itself ({type(error).__name__})", file=sys.stderr)
            peer.close()
            return
        finally:
            cut.cancel()
            self._unproved.release()
        try:
            self._serve_requests(connection, peer)
        finally:
            connection.close()
            peer.close()


def _shutdown(peer: socket.socket) -> None:
    try:
        peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # closed meanwhile
