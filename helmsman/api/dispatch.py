"""Dispatch modes: how a method of a worker group spreads its arguments over the ranks and joins
their results.

A method is declared with ``helmsman.register``: the replicated and the cut arguments, the axes, the
ranks that run it and those whose results count. Nothing is guessed from a value: a list as long as
the world stays what its declaration says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from helmsman.api.batch import Remainder
from helmsman.api.topology import AXES, Axis, Topology

T = TypeVar("T")


class Dispatch(Enum):
    """Which rank gets what, and which results come back. The names are those of the field."""

    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments; the results of all ranks, in rank order."""
    ONE_TO_ALL_ONE = "one_to_all_one"
    """Every rank gets the same arguments; the result of rank 0."""
    ALL_TO_ALL = "all_to_all"
    """Every argument is a sequence with one entry for each rank; the results of all ranks, in rank
    order.
    """
    DP_MP_COMPUTE = "dp_mp_compute"
    """Rows are cut over dp, and all ranks of one dp coordinate get the same share; the results of
    tp 0, cp 0 and the last pipeline stage, joined in dp order."""
    DP_MP_DISPATCH_FIRST = "dp_mp_dispatch_first"
    """As DP_MP_COMPUTE, but of each dp coordinate only the rank at tp 0, cp 0 and pp 0 gets its
    share; the others get None in place of what is cut, and are called all the same."""
    DP_MP_DISPATCH_FIRST_COLLECT_ALL = "dp_mp_dispatch_first_collect_all"
    """Rows go as with DP_MP_DISPATCH_FIRST; the results of all ranks, in rank order."""


class Execute(Enum):
    """Which ranks run a method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"
    """Only rank 0, whose result comes back as it is."""


class Collect(Enum):
    """What becomes of the results of rows that were cut."""

    JOIN = "join"
    """One batch, tensor, array, Ragged or list of all rows; None where all of them are None."""
    LIST = "list"
    """A list with an entry for each part, in their order; for metrics and the like."""


class AxisSharding(msgspec.Struct, frozen=True):
    """Rows cut along named axes: a dispatch mode of one's own."""

    shard: tuple[Axis, ...] = ("dp",)
    """Rows are cut over these axes together, the first of them outermost. None: everything is
    replicated.
    """
    replicate: tuple[Axis, ...] | None = None
    """All ranks along these axes get the same share; None: along all that are not cut. Along the
    rest one coordinate gets it, and the others None."""
    take: dict[Axis, int] = {}
    """Coordinate from which results are taken along an axis that is not cut: 0 where nothing is
    said, -1 for the last.
    """
    give: dict[Axis, int] = {}
    """Coordinate that gets a share along an axis that is neither cut nor replicated: 0 where
    nothing is said, -1 for the last."""

    def __post_init__(self) -> None:
        named = [*self.shard, *(self.replicate or ())]
        for axis in (*named, *self.take, *self.give):
            if axis not in AXES:
                raise ValueError(f"there is no axis {axis!r}; the axes are {', '.join(AXES)}")
        if len(set(named)) < len(named):
            raise ValueError(
                f"an axis is either cut or replicated, once; got shard={self.shard}, "
                f"replicate={self.replicate}"
            )
        if cut := set(self.take) & set(self.shard):
            raise ValueError(
                "results come from every coordinate of an axis that is cut; take names "
                f"{', '.join(sorted(cut))}"
            )
        if useless := set(self.give) - set(self.alone):
            raise ValueError(
                "give is for axes that are neither cut nor replicated; it names "
                f"{', '.join(sorted(useless))}"
            )

    @property
    def alone(self) -> tuple[Axis, ...]:
        """The axes that are neither cut nor replicated."""
        return (
            ()
            if self.replicate is None
            else tuple(axis for axis in AXES if axis not in (*self.shard, *self.replicate))
        )


class CustomDispatch(msgspec.Struct, frozen=True):
    """Functions of one's own; also written as ``{"dispatch_fn": ..., "collect_fn": ...}``."""

    dispatch_fn: Callable[..., tuple[Sequence[Sequence[Any]], Mapping[str, Sequence[Any]]]]
    """``dispatch_fn(topology, *args, **kwargs) -> (args, kwargs)``, each entry a sequence with one
    value for each rank.
    """
    collect_fn: Callable[[Topology, list[Any]], Any]
    """``collect_fn(topology, results)``; the results of all ranks that ran, in rank order."""


DispatchMode: TypeAlias = Dispatch | AxisSharding | CustomDispatch

CUTS = {
    Dispatch.DP_MP_COMPUTE: AxisSharding(("dp",), take={"pp": -1}),
    Dispatch.DP_MP_DISPATCH_FIRST: AxisSharding(("dp",), (), {"pp": -1}),
    Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL: AxisSharding(("dp",), ()),
}
"""Axes of the modes that cut rows."""


class Shard(Generic[T]):
    """In a call that no declaration describes: cut this argument along these axes, all ranks along
    the others get the same.

    Args:
        value: a batch, tensor, array, Ragged, list or tuple.
        axes: the first of them outermost.
        remainder: as for register.
    """

    def __init__(self, value: T, *axes: Axis, remainder: Remainder = "error") -> None:
        self.value = value
        self.sharding = AxisSharding(axes or ("dp",))
        self.remainder: Remainder = remainder


class Replicate(Generic[T]):
    """In a call that no declaration describes: every rank gets the same, which is also what a bare
    argument means there.
    """

    def __init__(self, value: T) -> None:
        self.value = value


class MethodSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a declaration says."""

    name: str
    """Of the method, as workers have it."""
    owner: str = ""
    """Of its class, for messages."""
    dispatch_mode: DispatchMode
    execute_mode: Execute = Execute.ALL
    shard: tuple[str, ...] | None = None
    """Parameters that are cut; None: all of them. For modes that cut."""
    remainder: Remainder = "error"
    collect: Collect | Callable[[list[Any]], Any] | None = None
    """For modes that cut and join; None otherwise."""
    signature: inspect.Signature | None = None
    """Without self; None where it is not known here."""

    @property
    def full_name(self) -> str:
        """'Class.method'."""
        return f"{self.owner}.{self.name}" if self.owner else self.name

    @property
    def sharding(self) -> AxisSharding | None:
        """Along which axes rows are cut; None for modes that do not cut."""
        if isinstance(self.dispatch_mode, AxisSharding):
            return self.dispatch_mode
        return CUTS.get(self.dispatch_mode) if isinstance(self.dispatch_mode, Dispatch) else None

    @property
    def mode_shown(self) -> str:
        """Its dispatch mode, for people."""
        return mode_name(self.dispatch_mode)

    @property
    def collects_all(self) -> bool:
        """Whether the results of all ranks come back, in rank order."""
        return self.dispatch_mode in (
            Dispatch.ONE_TO_ALL,
            Dispatch.ALL_TO_ALL,
            Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL,
        )


def mode_name(mode: DispatchMode) -> str:
    """A dispatch mode, for people."""
    return mode.name if isinstance(mode, Dispatch) else type(mode).__name__
