"""Messages between a controller and a worker, independent of the transport."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from helmsman.api.environment import EnvironmentVariable
from helmsman.api.platforms import DeviceGrant


class Verb(StrEnum):
    """Operation of a request. Each docstring gives its arguments and result."""

    HEALTH = "health"
    """() -> WorkerHealth as msgpack, which is cheap. Answered at once, even during a long call."""
    STACKS = "stacks"
    """() -> str, the stacks of all threads."""
    EXAMINE = "examine"
    """() -> ProcessReport: the stacks of its calls, its memory and children, and its node."""
    FILES = "files"
    """(worker id) -> dict[str, bytes]: recordings and log of a worker of this node; read-only."""
    CONFIGURE = "configure"
    """(WorkerConfig) -> None. Sets environment, thread counts and seeds."""
    SET_ENV = "set_env"
    """(dict) -> None."""
    ENVIRONMENT = "environment"
    """() -> list[EnvironmentVariable], sorted by name, secrets masked."""
    LEASE_PORTS = "lease_ports"
    """(int) -> list[int], ports leased to this worker until it ends."""
    PROBE_LISTEN = "probe_listen"
    """(port, proof, seconds) -> str. Listens on a port, so that other workers can try to connect.

    A port of None stops listening. Returns why listening failed, '' on success.
    """
    CHECK_CONNECT = "check_connect"
    """(address, port, proof, seconds) -> str. Connects to a worker that listens.

    Returns why connecting failed, '' on success.
    """
    CREATE_ENGINE = "create_engine"
    """(path or class, args, kwargs) -> None, on the engine thread."""
    CALL = "call"
    """(args, kwargs) -> the method's result."""
    INSPECT = "inspect"
    """([request id, ...]) -> {request id: CallState}. Reports the states of calls; read-only."""
    CANCEL = "cancel"
    """(request id) -> CallState. Withdraws a pending call; a call that has begun continues."""
    RELEASE = "release"
    """(handle id) -> None."""
    DESTROY = "destroy"
    """(names or None) -> list[str]. Destroys engines (None: all) on the engine thread.

    Returns descriptions of the failures.
    """
    SHUTDOWN = "shutdown"
    """() -> None; the process ends after the reply."""


ENGINE_WORK = frozenset({Verb.CREATE_ENGINE, Verb.CALL, Verb.DESTROY})
"""Verbs that concern engines; they begin in the order of their arrival."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One request. Its payload, which the codec packs separately, holds the verb's arguments."""

    id: int
    """Unique on its connection."""
    verb: Verb
    engine_name: str | None = None
    """None for the engine named after the worker."""
    method: str = ""
    keep: bool = False
    """Keep the result in the worker and reply with a handle."""
    broadcast: bool | None = None
    """Whether arguments come from the head of the model-parallel group.

    None derives it from the engine's topology.
    """
    discard: bool = False
    """Reply with None, since the caller does not use the result."""


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Reply to the request of the same id; its payload is the result if ``ok``, else the error."""

    id: int
    ok: bool


class CallState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a call, inspected shortly before its timeout and after it."""

    state: Literal["waiting", "running", "withdrawn", "ended"]
    """waiting: not begun; running: begun; withdrawn: will never begin; ended: its reply is on the
    way, or the request has not arrived.
    """
    stack: str = ""
    """Innermost frames of the call while it runs, else of the call that runs before it."""
    running: str | None = None
    """'engine.method' that occupies the engine thread, or the event loop if the call needs that."""
    running_s: float | None = None

    def describe(self, *, may_withdraw: bool = True) -> str:
        running = f"{self.running} (for {self.running_s or 0.0:.1f} s)" if self.running else ""
        behind, name = (f" behind {running}", f": {running}") if running else ("", "")
        waits = (
            "will be withdrawn unless it begins first"
            if may_withdraw
            else "will still run, as other ranks may wait for it"
        )
        arrives = "will not be begun" if may_withdraw else "will still be begun"
        return {
            "running": f"the call still runs there{name}",
            "waiting": f"the call had not begun{behind}, and {waits}",
            "withdrawn": f"the call had not begun{behind} and was withdrawn",
            "ended": "the call does not run there: it has just ended and its result was dropped, "
            "or it had not arrived and "
            f"{arrives}",
        }[self.state]


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    worker_id: str
    role: str
    rank: int
    node: str = ""
    """Address of its node."""
    log_path: str = ""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    rank: int
    seed: int = 0
    """Seed of the run; the worker derives its own from (seed, role, rank)."""
    environment: list[EnvironmentVariable] = []
    """Set before anything else; torch uses OMP_NUM_THREADS threads."""
    grant: DeviceGrant | None = None
    """Accelerators granted to the worker; verified on the first use of its platform."""


def dotted(engine_name: str | None, method: str) -> str:
    return f"{engine_name}.{method}" if engine_name else method
