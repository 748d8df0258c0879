"""Checks, the devices they run on, and their outcomes."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from helmsman import LocalScheduler, SchedulingSpec


class UnmetNeedError(Exception):
    """This machine lacks devices or a package that a check needs; the message names them."""


class Machine:
    """The devices of this machine, and the scheduler whose workers run on them.

    Args:
        scheduler: The scheduler of all checks; each check deletes its roles.
        is_rehearsal: Whether its devices are the CPU.
        is_one_device: Whether its two devices are one, by two names.
    """

    def __init__(
        self, scheduler: LocalScheduler, *, is_rehearsal: bool, is_one_device: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.num_devices = scheduler.n_gpus_per_node
        self.is_rehearsal = is_rehearsal
        self.is_one_device = is_one_device
        self.closing = contextlib.ExitStack()
        """Ends what several checks share, after the last check."""
        self.model: dict[str, Any] = {
            "model_type": "qwen2",
            "vocab_size": 512 if self.is_rehearsal else 32_000,
            "hidden_size": 64 if self.is_rehearsal else 1024,
            "intermediate_size": 128 if self.is_rehearsal else 4096,
            "num_hidden_layers": 2 if self.is_rehearsal else 16,
            "num_attention_heads": 4 if self.is_rehearsal else 16,
            "num_key_value_heads": 2 if self.is_rehearsal else 8,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "initializer_range": 0.1,
        }
        """A model of 0.4 billion parameters; a rehearsal uses a tiny one."""

    def spec(self, devices: int = 1, *, on_host: bool = False) -> SchedulingSpec:
        """Return the resources of a worker."""
        env_vars = {"HELMSMAN_PLATFORM": "cpu"} if on_host or self.is_rehearsal else {}
        return SchedulingSpec(cpu=0.5, gpu=0 if on_host else devices, env_vars=env_vars)

    def require(self, num_devices: int, why: str) -> None:
        """Raise UnmetNeedError if there are fewer devices."""
        if self.num_devices < num_devices:
            raise UnmetNeedError(
                f"{why} needs {num_devices} devices; this machine has {self.num_devices}"
            )

    def require_own_devices(self, why: str) -> None:
        """Raise UnmetNeedError if two workers share one device."""
        if self.is_one_device:
            raise UnmetNeedError(f"{why} needs a device for each process")


class Figure(msgspec.Struct, frozen=True):
    """A measured number, beside that of the same work without Helmsman."""

    value: float
    unit: str
    bare: float | None = None
    """In the same unit and the same run; None if it was not measured."""

    def __str__(self) -> str:
        text = f"{_number(self.value)} {self.unit}"
        if self.bare is None:
            return text
        ratio = _number(self.value / self.bare) if self.bare else "unknown"
        return f"{text} (bare {_number(self.bare)}, ratio {ratio})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


Check = Callable[[Machine], Mapping[str, str | Figure]]
"""Returns figures by name; raises AssertionError, or the error of a failed call."""
CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[Check], Check]:
    """Declare a check by this name."""

    def declare(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return declare


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a check."""

    name: str
    result: str
    """'ok', 'failed' or 'not run'."""
    seconds: float
    figures: dict[str, str] = {}
    """The figures as text, by name."""
    reason: str = ""


def perform(name: str, machine: Machine) -> Outcome:
    """Run one check."""
    started = time.monotonic()
    try:
        figures = CHECKS[name](machine)
    except UnmetNeedError as reason:
        return Outcome(
            name=name, result="not run", seconds=time.monotonic() - started, reason=str(reason)
        )
    # A failed check does not discard the figures of the others.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        told = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return Outcome(name=name, result="failed", seconds=time.monotonic() - started, reason=told)
    shown = {what: str(figure) for what, figure in figures.items()}
    return Outcome(name=name, result="ok", seconds=time.monotonic() - started, figures=shown)
