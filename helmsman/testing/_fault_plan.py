"""FaultPlan: which worker is killed, stopped or slowed at which step of a script, as text, as objects, or drawn from a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from helmsman.api.errors import FaultPlanError
from helmsman.api.faults import DropNode, Fault, Hang, Kill, Slow
from helmsman.api.scheduler import Scheduler
from helmsman.testing._fault_injector import FaultInjector

_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
_KINDS = ("kill", "hang", "slow", "drop")


class FaultPlan:
    """Faults in the order in which they are due.

    Args:
        faults: Kill("rollout/3", at_step=5) and so on; those of one step happen together.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults: tuple[Fault, ...] = tuple(sorted(faults, key=lambda fault: fault.at_step))

    @classmethod
    def parse(cls, text: str | Iterable[str]) -> FaultPlan:
        """A plan from text, or from lines of it. ``str(plan)`` is such a text.

            kill rollout/3 at step 5
            hang rollout/1 at step 7 for 20 s                 # or ms, min, h; without 'for', until its end
            slow rollout/2 by 3x at step 3 for 60 s; drop the node of rollout/0 at step 9

        Raises: FaultPlanError with the line, what was found there and what is expected.
        """
        lines = text.splitlines() if isinstance(text, str) else text
        return cls(
            _Line(number, part.strip()).fault()
            for number, line in enumerate(lines, start=1)
            for part in line.partition("#")[0].split(";")
            if part.strip()
        )

    @classmethod
    def random(
        cls,
        seed: int,
        workers: Sequence[str],
        steps: int,
        rates: Mapping[str, float],
        *,
        seconds: tuple[float, float] = (5.0, 60.0),
        factor: tuple[float, float] = (2.0, 10.0),
    ) -> FaultPlan:
        """A plan that the arguments determine, on any machine.

        Args:
            workers: ids of those that may be hit, each as likely as the others.
            steps: of the script; they are numbered from 1.
            rates: 'kill', 'hang', 'slow', 'drop' -> how likely one is at each step, from 0 to 1.
            seconds: shortest and longest time of being stopped or slow.
            factor: least and most slowness.
        Raises: ValueError.
        """
        for kind, rate in rates.items():
            if kind not in _KINDS or not 0 <= rate <= 1:
                raise ValueError(f"rates has {kind!r}: {rate!r}; expected {', '.join(map(repr, _KINDS))} with 0 to 1")
        if rates and not workers:
            raise ValueError("workers is empty; expected the ids of those that faults may hit")
        source = random.Random(seed)  # of which only random() is the same in every version of Python

        def between(bounds: tuple[float, float]) -> float:
            return round(bounds[0] + (bounds[1] - bounds[0]) * source.random(), 3)

        def drawn() -> Iterator[Fault]:
            for step in range(1, steps + 1):
                for kind in _KINDS:
                    hits, place = source.random() < rates.get(kind, 0.0), source.random()
                    lasts, times = between(seconds), between(factor)
                    if hits:  # all is drawn in any case, so that a rate decides of its own kind alone
                        yield _made(kind, workers[int(place * len(workers))], step, times, lasts)

        return cls(drawn())

    def begin(self, scheduler: Scheduler) -> FaultInjector:
        """Begin to inject the faults into workers of a scheduler, which need not have started yet.

        Raises: FaultsUnsupportedError on a scheduler whose workers are no processes, unless there is nothing to do.
        """
        return FaultInjector(self.faults, scheduler)

    def __str__(self) -> str:
        return "\n".join(map(str, self.faults))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FaultPlan) and self.faults == other.faults

    def __hash__(self) -> int:
        return hash(self.faults)


def _made(kind: str, worker_id: str, step: int, factor: float, seconds: float | None) -> Fault:
    match kind:
        case "kill":
            return Kill(worker_id, at_step=step)
        case "hang":
            return Hang(worker_id, at_step=step, seconds=seconds)
        case "slow":
            return Slow(worker_id, at_step=step, factor=factor, seconds=seconds)
    return DropNode(worker_id, at_step=step)


class _Line:
    """One fault as text, read word by word."""

    def __init__(self, number: int, text: str) -> None:
        self._number, self._text = number, text
        self._words = text.split()

    def fault(self) -> Fault:
        kind = self._take("|".join(_KINDS), "'kill', 'hang', 'slow' or 'drop'").group()
        if kind == "drop":
            for word in ("the", "node", "of"):
                self._take(word, f"{word!r}, as in 'drop the node of rollout/0',")
        worker_id = self._take(r".+/\d+", "a worker's id, 'role/index',").group()
        factor, seconds = 1.0, None
        if kind == "slow":
            self._take("by", "'by' and a factor, as in 'by 3x',")
            factor = float(self._take(r"(\d+(?:\.\d*)?)x?", "a factor, as in '3x',").group(1))
        for word in ("at", "step"):
            self._take(word, f"{word!r}, as in 'at step 5',")
        step = int(self._take(r"\d{1,18}", "the number of a step").group())
        if kind in ("hang", "slow") and self._words:
            self._take("for", "'for' and a time, as in 'for 20 s', or the end")
            seconds = self._seconds()
        if self._words:
            raise self._error(" ".join(self._words), "the end")
        try:
            return _made(kind, worker_id, step, factor, seconds)
        except ValueError as error:
            raise FaultPlanError(
                line=self._number, text=self._text, found="a number out of range", expected=f"what this says ({error})"
            ) from error

    def _seconds(self) -> float:
        what = "a time, as in '20 s', '500 ms', '2 min' or '1 h',"
        number, unit = self._take(r"(\d+(?:\.\d*)?)(ms|s|min|h)?", what).groups()
        return float(number) * _UNITS[unit or self._take("ms|s|min|h", "a unit of time (ms, s, min or h)").group()]

    def _take(self, pattern: str, expected: str) -> re.Match[str]:
        """The next word, which must be so."""
        found = re.fullmatch(pattern, self._words[0]) if self._words else None
        if found is None:
            raise self._error(self._words[0] if self._words else "", expected)
        del self._words[0]
        return found

    def _error(self, found: str, expected: str) -> FaultPlanError:
        return FaultPlanError(
            line=self._number, text=self._text, found=repr(found) if found else "the end", expected=expected.rstrip(",")
        )
