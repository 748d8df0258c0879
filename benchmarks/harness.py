"""Declaration and measurement of cases: ours and its floor alternate in one run, so that a noisy
machine slows both.

A case is a function that prepares both and returns them as a Pair:

    @case("calls.local.sync", unit="us", goal="<= 1/6", floor="ray.get(actor.ping.remote())")
    def local_sync(world: World) -> Pair:
        ...
        return Pair(ours=lambda: scheduler.call_engine(...), floor=lambda: ray.get(...))
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from benchmarks.world import World

_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6}
"""Units of time; a case returns figures in other units itself."""
RATE = "calls/s"
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {"<=": operator.le, ">=": operator.ge}


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """The two sides that a case compares."""

    ours: Callable[[], Any]
    floor: Callable[[], Any] | float
    """A function, or a constant in the unit of the case."""
    rounds: int = 10
    """Rounds in which ours and the floor alternate."""
    repeats: int = 1
    """Runs of each side in a round, of which the median counts."""
    per_run: int = 1
    """Operations in one run; its time is divided by them."""
    returns_figure: bool = False
    """Whether ours and floor return the figure (seconds for a unit of time) and are not timed."""
    warm_up: int = 1
    """Runs of each side before the first round, which do not count."""


class SkippedError(Exception):
    """A case cannot run here; the message gives the reason and the next step."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A declared case."""

    name: str
    """Dotted name, from the general to the particular; any leading part selects the case."""
    unit: str
    goal: str
    """Goal of the ratio: '<= 1.15', '<= 1/6' (six times faster), '>= 1'; '' for none."""
    floor: str
    """Description of the floor."""
    is_default: bool
    """Whether the case runs when no case is named."""
    prepare: Callable[[World], Pair]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A measured case, in the form of results.json."""

    case: str
    ours: float
    """Median."""
    floor: float
    """Median."""
    unit: str
    ratio: float
    """Median over the rounds of ours / floor."""
    goal: str | None
    met: bool | None
    """None without a goal."""
    ours_p10: float
    ours_p90: float
    floor_p10: float
    floor_p90: float
    ratio_p10: float
    ratio_p90: float
    rounds: int
    floor_is: str
    took_s: float
    """Duration of the whole case in seconds."""


CASES: dict[str, Case] = {}


def case(
    name: str, *, unit: str, floor: str, goal: str = "", is_default: bool = True
) -> Callable[[Callable[[World], Pair]], Callable[[World], Pair]]:
    """Declare a case; see Case for the arguments."""
    if goal:
        meets(goal, 1.0)

    def declare(prepare: Callable[[World], Pair]) -> Callable[[World], Pair]:
        if name in CASES:
            raise ValueError(f"there are two cases called {name!r}")
        CASES[name] = Case(
            name=name, unit=unit, goal=goal, floor=floor, is_default=is_default, prepare=prepare
        )
        return prepare

    return declare


def select(names: Sequence[str]) -> list[Case]:
    """Return the cases with these names or leading parts of names, in the order of declaration.

    Without names, the default cases are returned. Raises ValueError for a name that selects none.
    """
    if not names:
        return [each for each in CASES.values() if each.is_default]
    for name in names:
        if not any(_is_under(each, name) for each in CASES):
            groups = sorted({each.partition(".")[0] for each in CASES})
            raise ValueError(
                f"no case is called {name!r}; there are {', '.join(groups)}, and parts of them "
                f"({next(iter(CASES))})"
            )
    return [each for each in CASES.values() if any(_is_under(each.name, name) for name in names)]


def _is_under(case_name: str, name: str) -> bool:
    return case_name == name or case_name.startswith(f"{name}.")


def goal_value(goal: str) -> float:
    """Return the number in a goal."""
    return float(Fraction(goal.split()[1]))


def meets(goal: str, ratio: float) -> bool:
    """Whether a ratio meets a goal. Raises ValueError or KeyError for an invalid goal."""
    return _COMPARISONS[goal.split()[0]](ratio, goal_value(goal))


def measure(declared: Case, world: World) -> Result:
    """Prepare a case, alternate ours and the floor, and undo the preparation."""
    started = time.monotonic()
    with world.scope():
        pair = declared.prepare(world)
        ours, floor, ratios = _take_turns(pair, declared.unit)
    ratio = statistics.median(ratios)
    bounds = {"ours": _spread(ours), "floor": _spread(floor), "ratio": _spread(ratios)}
    return Result(
        case=declared.name,
        ours=statistics.median(ours),
        floor=statistics.median(floor),
        unit=declared.unit,
        ratio=ratio,
        goal=declared.goal or None,
        met=meets(declared.goal, ratio) if declared.goal else None,
        rounds=pair.rounds,
        floor_is=declared.floor,
        took_s=round(time.monotonic() - started, 3),
        **{
            f"{what}_{end}": value
            for what, ends in bounds.items()
            for end, value in zip(("p10", "p90"), ends, strict=True)
        },
    )


def _take_turns(pair: Pair, unit: str) -> tuple[list[float], list[float], list[float]]:
    """Return all figures of ours and of the floor, and the ratio of the medians of each round."""
    sides = [_figures(pair.ours, pair, unit), _figures(pair.floor, pair, unit)]
    for _ in range(pair.warm_up):
        for side in sides:
            side(1)
    figures: tuple[list[float], list[float]] = ([], [])
    ratios = []
    for turn in range(pair.rounds):
        medians = [0.0, 0.0]
        for index in (0, 1) if turn % 2 == 0 else (1, 0):
            # neither side always follows the other, which warms caches
            taken = sides[index](pair.repeats)
            figures[index].extend(taken)
            medians[index] = statistics.median(taken)
        ratios.append(medians[0] / medians[1])
    return *figures, ratios


def _figures(
    side: Callable[[], Any] | float, pair: Pair, unit: str
) -> Callable[[int], list[float]]:
    """Return a function that takes a number of figures of one side, in the unit of the case."""
    if not callable(side):
        return lambda count: [side]
    scale = _PER_SECOND.get(unit, 1.0)
    if pair.returns_figure:
        return lambda count: [side() * scale for _ in range(count)]

    def timed() -> float:
        start = time.perf_counter()
        side()
        seconds = (time.perf_counter() - start) / pair.per_run
        return 1 / seconds if unit == RATE else seconds * scale

    return lambda count: [timed() for _ in range(count)]


def _spread(figures: Sequence[float]) -> tuple[float, float]:
    """Return the 10th and 90th percentile."""
    if len(figures) == 1:
        return figures[0], figures[0]
    cuts = statistics.quantiles(figures, n=10, method="inclusive")
    return cuts[0], cuts[-1]
