"""KeptCalls: arguments of a role's recent calls in files, for ``helmsman replay``."""

from __future__ import annotations

import collections
import logging
import os
import pickle
from pathlib import Path

import msgspec

from helmsman.rpc_server._process.safe_files import open_log, private_directory
from helmsman.rpc_server._wire.codec import Payload
from helmsman.rpc_server._wire.messages import Request, Verb

log = logging.getLogger(__name__)

FOLDER = "calls"
_MOST_BEFORE = 20


class KeptCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call with its arguments."""

    worker_id: str
    request: Request
    payload: bytes
    """Pickle of the Payload."""
    before: list[int]
    """Numbers of the calls that prepared the engine, its construction first."""


class KeptCalls:
    """Keeps the last calls of a method, and those before the first of them, for each worker."""

    def __init__(self, log_dir: Path, run_id: str, method: str, most: int) -> None:
        self._log_dir, self._run_id, self._method = log_dir, run_id, method
        self._before: dict[str, list[int]] = {}
        self._kept: dict[str, collections.deque[int]] = {}
        self._most = most

    def keep(self, worker_id: str, request: Request, payload: Payload) -> None:
        """Write a call to a file, if it is one to keep; a failure is logged."""
        is_wanted = request.verb is Verb.CALL and request.method == self._method
        before = self._before.setdefault(worker_id, [])
        if not is_wanted:
            if worker_id in self._kept or len(before) >= _MOST_BEFORE:
                return
            before.append(request.id)
        plain = Payload(bytes(payload.data), [bytes(b) for b in payload.buffers], payload.handles)
        call = KeptCall(
            worker_id=worker_id,
            request=request,
            payload=pickle.dumps(plain, protocol=5),
            before=list(before) if is_wanted else [],
        )
        try:
            with private_directory(self._log_dir, FOLDER):
                fd = open_log(self._path(request.id), self._run_id)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.msgpack.encode(call))
            if is_wanted:
                kept = self._kept.setdefault(worker_id, collections.deque())
                kept.append(request.id)
                if len(kept) > self._most:
                    self._path(kept.popleft()).unlink(missing_ok=True)
        except OSError as error:
            log.warning("call %d of %s is not kept: %s", request.id, worker_id, error)

    def _path(self, number: int) -> Path:
        return self._log_dir / FOLDER / f"{number}.call"
