"""Dispatch modes: how a group method splits its arguments over ranks and joins the results.

``helmsman.register`` declares a method: the replicated and the split arguments, the axes, the ranks
that run it and the ranks whose results are returned. Nothing is guessed from a value: a list whose
length equals the world size is treated as declared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from helmsman.api.parts import Remainder
from helmsman.api.topology import AXES, Axis, Topology

T = TypeVar("T")


class Dispatch(Enum):
    """Distribution of arguments over ranks, and selection of the results that are returned.

    The names are those of ROLL.
    """

    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments. Returns the results of all ranks, in rank order."""
    ONE_TO_ALL_ONE = "one_to_all_one"
    """Every rank gets the same arguments. Returns the result of rank 0."""
    ALL_TO_ALL = "all_to_all"
    """Every argument is a sequence with one entry per rank. Returns the results of all ranks, in
    rank order.
    """
    DP_MP_COMPUTE = "dp_mp_compute"
    """Rows are split over dp; all ranks of one dp coordinate get the same share. Returns the
    results of tp 0, cp 0 and the last pipeline stage, joined in dp order.
    """
    DP_MP_DISPATCH_FIRST = "dp_mp_dispatch_first"
    """Like DP_MP_COMPUTE, but in each dp coordinate only the rank at tp 0, cp 0 and pp 0 gets the
    share. The other ranks are also called, with None in place of each split argument.
    """
    DP_MP_DISPATCH_FIRST_COLLECT_ALL = "dp_mp_dispatch_first_collect_all"
    """Rows are split as in DP_MP_DISPATCH_FIRST. Returns the results of all ranks, in rank order.
    """


class Execute(Enum):
    """The ranks that run a method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"
    """Only rank 0, whose result is returned as it is."""


class Collect(Enum):
    """Combination of the results of split rows."""

    JOIN = "join"
    """One batch, tensor, array, Ragged or list of all rows. Results without rows, such as numbers,
    texts and dicts, are returned as LIST does, which type checkers require to be declared. None if
    all results are None.
    """
    LIST = "list"
    """A list with one entry per part, in order; suits metrics."""


class AxisSharding(msgspec.Struct, frozen=True):
    """A custom dispatch mode: rows are split along named axes."""

    shard: tuple[Axis, ...] = ("dp",)
    """Rows are split over these axes together, the first one outermost. Empty: everything is
    replicated.
    """
    replicate: tuple[Axis, ...] | None = None
    """All ranks along these axes get the same share; None: along all axes that are not split. Along
    the remaining axes, one coordinate gets the share and the others get None.
    """
    take: dict[Axis, int] = {}
    """Axis that is not split -> coordinate whose results are taken: 0 by default, -1 for the last.
    """
    give: dict[Axis, int] = {}
    """Axis that is neither split nor replicated -> coordinate that gets the share: 0 by default, -1
    for the last.
    """
    meta_to_all: bool = False
    """Whether ranks without a share of a Batch get an empty one with its meta, instead of None."""

    def __post_init__(self) -> None:
        named = [*self.shard, *(self.replicate or ())]
        for axis in (*named, *self.take, *self.give):
            if axis not in AXES:
                raise ValueError(f"there is no axis {axis!r}; the axes are {', '.join(AXES)}")
        if len(set(named)) < len(named):
            raise ValueError(
                f"an axis is named twice; expected each at most once, in shard or in replicate; "
                f"got shard={self.shard}, replicate={self.replicate}"
            )
        if split := set(self.take) & set(self.shard):
            raise ValueError(
                f"take and shard both contain {', '.join(sorted(split))}; expected only "
                "axes that are not split in take, since every part of a split axis is returned"
            )
        if useless := set(self.give) - set(self.alone):
            raise ValueError(
                f"give contains {', '.join(sorted(useless))}; expected axes that are neither split "
                "nor replicated"
            )

    @property
    def alone(self) -> tuple[Axis, ...]:
        """The axes that are neither split nor replicated."""
        return (
            ()
            if self.replicate is None
            else tuple(axis for axis in AXES if axis not in (*self.shard, *self.replicate))
        )


class CustomDispatch(msgspec.Struct, frozen=True):
    """User-defined dispatch; also written as ``{"dispatch_fn": ..., "collect_fn": ...}``."""

    dispatch_fn: Callable[..., tuple[Sequence[Sequence[Any]], Mapping[str, Sequence[Any]]]]
    """``dispatch_fn(topology, *args, **kwargs) -> (args, kwargs)``; each returned argument is a
    sequence with one value per rank.
    """
    collect_fn: Callable[[Topology, list[Any]], Any]
    """``collect_fn(topology, results)``; receives the results of all ranks that ran, in rank order.
    """


DispatchMode: TypeAlias = Dispatch | AxisSharding | CustomDispatch


class Unregistered(msgspec.Struct, frozen=True):
    """Dispatch of a call by name: a Shard is split, and every other argument is replicated."""

    ranks: Sequence[int]
    """Ranks that are called; their results are returned in this order."""


CUTS = {
    Dispatch.DP_MP_COMPUTE: AxisSharding(("dp",), take={"pp": -1}),
    Dispatch.DP_MP_DISPATCH_FIRST: AxisSharding(("dp",), (), {"pp": -1}),
    Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL: AxisSharding(("dp",), ()),
}
"""Axes of the modes that split rows."""

_LISTED = (
    Dispatch.ONE_TO_ALL,
    Dispatch.ALL_TO_ALL,
    Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL,
)
"""Modes that return the results of all ranks."""


class Shard(Generic[T]):
    """Splits one argument of a call without a declaration; other axes replicate the shares.

    Args:
        value: A batch, tensor, array, Ragged, list or tuple.
        *axes: Axes to split along, outermost first; ``dp`` if none is given.
        remainder: Handling of rows that do not divide evenly; see ``register``.
    """

    def __init__(self, value: T, *axes: Axis, remainder: Remainder = "error") -> None:
        self.value = value
        self.sharding = AxisSharding(axes or ("dp",))
        self.remainder: Remainder = remainder


class Replicate(Generic[T]):
    """Gives every rank the same argument in a call without a declaration; the default there."""

    def __init__(self, value: T) -> None:
        self.value = value


class MethodSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of a group method."""

    name: str
    """Name of the method on the workers."""
    owner: str = ""
    """Name of its class, for messages."""
    dispatch_mode: DispatchMode | Unregistered
    execute_mode: Execute = Execute.ALL
    shard: tuple[str, ...] | None = None
    """Parameters that are split, for modes that split; None: all of them."""
    remainder: Remainder = "error"
    collect: Collect | Callable[[list[Any]], Any] | None = None
    """For modes that split and join; None otherwise."""
    signature: inspect.Signature | None = None
    """Signature without self; None if it is unknown."""

    @property
    def full_name(self) -> str:
        """'Class.method'."""
        return f"{self.owner}.{self.name}" if self.owner else self.name

    @property
    def sharding(self) -> AxisSharding | None:
        """The axes along which rows are split; None for modes that do not split."""
        if isinstance(self.dispatch_mode, AxisSharding):
            return self.dispatch_mode
        return CUTS.get(self.dispatch_mode) if isinstance(self.dispatch_mode, Dispatch) else None

    @property
    def mode_shown(self) -> str:
        """Name of the dispatch mode, for messages."""
        return mode_name(self.dispatch_mode)

    @property
    def collects_all(self) -> bool:
        """Whether the results of all ranks that are called are returned, in a list."""
        return self.execute_mode is Execute.ALL and (
            isinstance(self.dispatch_mode, Unregistered) or self.dispatch_mode in _LISTED
        )


def mode_name(mode: DispatchMode | Unregistered) -> str:
    """Return the name of a dispatch mode, for messages."""
    return mode.name if isinstance(mode, Dispatch) else type(mode).__name__
