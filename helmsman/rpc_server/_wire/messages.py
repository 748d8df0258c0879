"""The messages between a controller and a worker, whatever carries them."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Literal

import msgspec

from helmsman.api.environment import EnvironmentVariable
from helmsman.api.platforms import DeviceGrant


class Verb(StrEnum):
    HEALTH = "health"
    """-> WorkerHealth as msgpack, since it is asked often. Answered at once, also during a long
    call.
    """
    STACKS = "stacks"
    """-> str, the stacks of all threads."""
    CONFIGURE = "configure"
    """(WorkerConfig) -> None. Environment, thread counts, seeds."""
    SET_ENV = "set_env"
    """(dict) -> None."""
    ENVIRONMENT = "environment"
    """() -> list[EnvironmentVariable], sorted by name, secrets masked."""
    LEASE_PORTS = "lease_ports"
    """(int) -> list[int], ports held for this worker until it ends."""
    PROBE_LISTEN = "probe_listen"
    """(port, proof, seconds) -> str. Listens on a port, so that others can try to reach it; a port
    of None ends that. Returns why it cannot, '' when it does."""
    CHECK_CONNECT = "check_connect"
    """(address, port, proof, seconds) -> str. Connects to a worker that listens; returns why it
    cannot, '' when it did.
    """
    CREATE_ENGINE = "create_engine"
    """(path or class, args, kwargs) -> None, on the engine thread."""
    CALL = "call"
    """(args, kwargs) -> the method's result."""
    INSPECT = "inspect"
    """([request id, ...]) -> {request id: CallState}. Reports the states of calls, and changes
    nothing.
    """
    CANCEL = "cancel"
    """(request id) -> CallState. Withdraws a call that has not begun; one that has begun goes
    on.
    """
    RELEASE = "release"
    """(handle id) -> None."""
    FAULT = "fault"
    """(FaultCommand) -> str, what it has ended that lasted. The worker does this to itself once it
    has answered.
    """
    DESTROY = "destroy"
    """(names or None) -> list[str]. Destroys these engines (None: all) on the engine thread;
    returns what went wrong.
    """
    SHUTDOWN = "shutdown"
    """() -> None; the process ends after the reply."""


ENGINE_WORK = frozenset({Verb.CREATE_ENGINE, Verb.CALL, Verb.DESTROY})
"""What is done for engines, in the order in which it was asked for."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One request. Its payload, packed apart by the codec, is the tuple of the verb's arguments."""

    id: int
    """Unique on its connection."""
    verb: Verb
    engine_name: str | None = None
    """None for the engine that bears the worker's id."""
    method: str = ""
    keep: bool = False
    """Leave the result in the worker and answer with a handle."""
    broadcast: bool | None = None
    """Whether arguments come from the head of the model-parallel group; None lets the engine's
    topology decide.
    """
    discard: bool = False
    """Answer with None, since nobody wants the result."""


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the request of the same id; the payload is the result, or the error when not
    ``ok``.
    """

    id: int
    ok: bool


class CallState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a call is, asked for shortly before its time-out, and after it."""

    state: Literal["waiting", "running", "withdrawn", "ended"]
    """waiting: it has not begun; running: it has; withdrawn: it had not, and now never will; ended:
    its reply is on the way, or it has not arrived."""
    stack: str = ""
    """Innermost frames of the call while it runs, of the call that runs before it while it waits or
    was withdrawn.
    """
    running: str | None = None
    """'engine.method' that occupies the engine thread, or the event loop before a call that waits
    for that.
    """
    running_s: float | None = None

    def describe(self, *, may_withdraw: bool = True) -> str:
        running = (
            f"{self.running} (for {self.running_s or 0.0:.1f} s)" if self.running else "nothing"
        )
        waits = (
            "will be withdrawn if it still has not"
            if may_withdraw
            else "will run after it, as other ranks may wait for it"
        )
        arrives = "will not be begun" if may_withdraw else "will still be begun"
        return {
            "running": f"the call still runs there: {running}",
            "waiting": f"the call had not begun behind {running}, and {waits}",
            "withdrawn": f"the call had not begun behind {running} and was withdrawn",
            "ended": "the call does not run there: it ended just now and its result was dropped, "
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
    """Seed of the run; the worker seeds from (seed, role, rank)."""
    environment: list[EnvironmentVariable] = []
    """Set before anything else; torch gets as many threads as OMP_NUM_THREADS says."""
    grant: DeviceGrant | None = None
    """Accelerators that the worker was granted, which it verifies on the first use of its
    platform.
    """


class FaultCommand(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["kill", "stop"]
    factor: float = math.inf
    """A process that is stopped runs for one part of the time in so many; infinity for none."""
    seconds: float = math.inf
    """For how long; infinity until its end."""
    ends_raylet: bool = False
    """Whether Ray's own process on the node is killed, too."""

    def describe(self) -> str:
        if self.kind == "kill":
            return "killed"
        what = "stopped" if math.isinf(self.factor) else f"slowed by {self.factor:g}x"
        return (
            f"{what} for {self.seconds:g} s"
            if math.isfinite(self.seconds)
            else f"{what} until its end"
        )


def dotted(engine_name: str | None, method: str) -> str:
    return f"{engine_name}.{method}" if engine_name else method
