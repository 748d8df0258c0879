"""Faults that a script injects into its own workers, to see that the run survives them; see
helmsman.testing.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import msgspec


class _Aimed(msgspec.Struct, frozen=True):
    worker_id: str
    """'role/index'."""


class _Fault(_Aimed, frozen=True, kw_only=True):
    at_step: int
    """The script's step, as it passes it to FaultInjector.step."""

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
        if not holds or not math.isfinite(value):  # not so for nan either
            raise ValueError(
                f"{name} is {value:g} in a fault of {self.worker_id}; expected {least}"
            )


class Kill(_Fault, frozen=True, kw_only=True, tag=True):
    """The worker's process ends by SIGKILL."""

    def __str__(self) -> str:
        return f"kill {self.worker_id} at step {self.at_step}"


class _Lasting(_Fault, frozen=True, kw_only=True):
    seconds: float | None = None
    """For how long; until its end when None."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds is not None:
            self._require("seconds", self.seconds, "more than 0", self.seconds > 0)

    @property
    def _time(self) -> str:
        return "" if self.seconds is None else f" for {self.seconds:g} s"


class Hang(_Lasting, frozen=True, kw_only=True, tag=True):
    """The worker's process is stopped, as by SIGSTOP: nothing of it answers, and nothing has
    ended.
    """

    def __str__(self) -> str:
        return f"hang {self.worker_id} at step {self.at_step}{self._time}"


class Slow(_Lasting, frozen=True, kw_only=True, tag=True):
    """The worker's process runs a part of the time only, and is stopped for the rest of each tenth
    of a second.
    """

    factor: float
    """It runs for one part in so many; 1000 at most, beyond which it would rather hang."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            "factor", self.factor, "more than 1, and at most 1000", 1 < self.factor <= 1000
        )

    def __str__(self) -> str:
        return f"slow {self.worker_id} by {self.factor:g}x at step {self.at_step}{self._time}"


class DropNode(_Fault, frozen=True, kw_only=True, tag=True):
    """All workers of this run on the worker's node end by SIGKILL at once, and its raylet where the
    cluster is this run's.
    """

    def __str__(self) -> str:
        return f"drop the node of {self.worker_id} at step {self.at_step}"


Fault: TypeAlias = Kill | Hang | Slow | DropNode


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a fault at one worker."""

    worker_id: str
    pid: int | None
    """The worker's process; None where there is none."""
    node: str
    """Address of its node; '' where there is none."""
    done: bool
    """Whether the fault has been inflicted."""
    outcome: str
    """What has happened, or why it has not, for people."""
