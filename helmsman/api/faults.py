"""Faults that a script injects into its own workers to test recovery; see helmsman.testing."""

from __future__ import annotations

import math
from typing import TypeAlias

import msgspec


class _Aimed(msgspec.Struct, frozen=True):
    worker_id: str
    """'role/index'."""


class _Fault(_Aimed, frozen=True, kw_only=True):
    at_step: int
    """The script's step number, as passed to FaultInjector.step."""

    def __post_init__(self) -> None:
        role, _, index = self.worker_id.rpartition("/")
        if not role or not index.isdecimal():
            raise ValueError(
                f"a fault is aimed at {self.worker_id!r}; expected a worker's id, 'role/index'"
            )
        if self.at_step < 0:
            raise ValueError(
                f"a fault of {self.worker_id} is at step {self.at_step}; expected 0 or more"
            )

    def _require(self, name: str, value: float, least: str, holds: bool) -> None:
        if not holds or not math.isfinite(value):  # Rejects nan, too.
            raise ValueError(
                f"{name} is {value:g} in a fault of {self.worker_id}; expected {least}"
            )


class Kill(_Fault, frozen=True, kw_only=True, tag=True):
    """SIGKILL ends the worker's process."""

    def __str__(self) -> str:
        return f"kill {self.worker_id} at step {self.at_step}"


class _Lasting(_Fault, frozen=True, kw_only=True):
    seconds: float | None = None
    """Duration in seconds; None: until the process ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds is not None:
            self._require("seconds", self.seconds, "more than 0", self.seconds > 0)

    @property
    def _time(self) -> str:
        return "" if self.seconds is None else f" for {self.seconds:g} s"


class Hang(_Lasting, frozen=True, kw_only=True, tag=True):
    """The worker's process is stopped, as by SIGSTOP: it does not answer, and has not ended."""

    def __str__(self) -> str:
        return f"hang {self.worker_id} at step {self.at_step}{self._time}"


class Slow(_Lasting, frozen=True, kw_only=True, tag=True):
    """The worker's process runs for only a fraction of each tenth of a second."""

    factor: float
    """The fraction is 1 / factor. At most 1000; beyond that the process would effectively hang."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            "factor", self.factor, "more than 1, and at most 1000", 1 < self.factor <= 1000
        )

    def __str__(self) -> str:
        return f"slow {self.worker_id} by {self.factor:g}x at step {self.at_step}{self._time}"


class DropNode(_Fault, frozen=True, kw_only=True, tag=True):
    """SIGKILL ends all workers of this run on the worker's node at once.

    It also ends the node's raylet, if the cluster belongs to this run.
    """

    def __str__(self) -> str:
        return f"drop the node of {self.worker_id} at step {self.at_step}"


Fault: TypeAlias = Kill | Hang | Slow | DropNode


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a fault for one worker."""

    worker_id: str
    pid: int | None
    """The worker's process; None if there is none."""
    node: str
    """Address of its node; '' if there is none."""
    done: bool
    """Whether the fault was injected."""
    outcome: str
    """The effect, or the reason why the fault was not injected, for messages."""
