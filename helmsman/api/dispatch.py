"""How a method of a worker group spreads its arguments over the ranks and what it makes of their results.

A method is declared with ``register``: what is replicated, what is cut and along which axes, which ranks run it and which of
their results count. Nothing is guessed from a value: a list as long as the world stays what its declaration says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, overload

import msgspec

from helmsman.api.batch import Batch, Remainder
from helmsman.api.columns import Ragged
from helmsman.api.errors import DispatchError
from helmsman.api.topology import AXES, Axis, Topology
from helmsman.api.worker_group import GroupMethod, WorkerGroup

if TYPE_CHECKING:
    import numpy as np
    import torch

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")
W_contra = TypeVar("W_contra", contravariant=True)
R = TypeVar("R")
G = TypeVar("G")
J = TypeVar("J", bound="Batch | torch.Tensor | np.ndarray[Any, Any] | list[Any] | Ragged")


class Dispatch(Enum):
    """Which rank gets what, and which results come back. The names are those of the field."""

    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments; the results of all ranks, in rank order."""
    ONE_TO_ALL_ONE = "one_to_all_one"
    """Every rank gets the same arguments; the result of rank 0."""
    ALL_TO_ALL = "all_to_all"
    """Every argument is a sequence with one entry for each rank; the results of all ranks, in rank order."""
    DP_MP_COMPUTE = "dp_mp_compute"
    """Rows are cut over dp, and all ranks of one dp coordinate get the same share; the results of tp 0, cp 0 and the last
    pipeline stage, joined in dp order."""
    DP_MP_DISPATCH_FIRST = "dp_mp_dispatch_first"
    """As DP_MP_COMPUTE, but of each dp coordinate only the rank at tp 0, cp 0 and pp 0 gets its share; the others get None in
    place of what is cut, and are called all the same."""
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
    """Rows are cut over these axes together, the first of them outermost. None: everything is replicated."""
    replicate: tuple[Axis, ...] | None = None
    """All ranks along these axes get the same share; None: along all that are not cut. Along the rest one coordinate gets it,
    and the others None."""
    take: dict[Axis, int] = {}
    """Coordinate from which results are taken along an axis that is not cut: 0 where nothing is said, -1 for the last."""
    give: dict[Axis, int] = {}
    """Coordinate that gets a share along an axis that is neither cut nor replicated: 0 where nothing is said, -1 for the
    last."""

    def __post_init__(self) -> None:
        named = [*self.shard, *(self.replicate or ())]
        for axis in (*named, *self.take, *self.give):
            if axis not in AXES:
                raise ValueError(f"there is no axis {axis!r}; the axes are {', '.join(AXES)}")
        if len(set(named)) < len(named):
            raise ValueError(f"an axis is either cut or replicated, once; got shard={self.shard}, replicate={self.replicate}")
        if cut := set(self.take) & set(self.shard):
            raise ValueError(f"results come from every coordinate of an axis that is cut; take names {', '.join(sorted(cut))}")
        if useless := set(self.give) - set(self.alone):
            raise ValueError(f"give is for axes that are neither cut nor replicated; it names {', '.join(sorted(useless))}")

    @property
    def alone(self) -> tuple[Axis, ...]:
        """The axes that are neither cut nor replicated."""
        return () if self.replicate is None else tuple(axis for axis in AXES if axis not in (*self.shard, *self.replicate))


class CustomDispatch(msgspec.Struct, frozen=True):
    """Functions of one's own; also written as ``{"dispatch_fn": ..., "collect_fn": ...}``."""

    dispatch_fn: Callable[..., tuple[Sequence[Sequence[Any]], Mapping[str, Sequence[Any]]]]
    """``dispatch_fn(topology, *args, **kwargs) -> (args, kwargs)``, each entry a sequence with one value for each rank."""
    collect_fn: Callable[[Topology, list[Any]], Any]
    """``collect_fn(topology, results)``; the results of all ranks that ran, in rank order."""


DispatchMode: TypeAlias = Dispatch | AxisSharding | CustomDispatch

_CUT = {
    Dispatch.DP_MP_COMPUTE: AxisSharding(("dp",), take={"pp": -1}),
    Dispatch.DP_MP_DISPATCH_FIRST: AxisSharding(("dp",), (), {"pp": -1}),
    Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL: AxisSharding(("dp",), ()),
}


class Shard(Generic[T]):
    """In a call that no declaration describes: cut this argument along these axes, all ranks along the others get the same.

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
    """In a call that no declaration describes: every rank gets the same, which is also what a bare argument means there."""

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
        return _CUT.get(self.dispatch_mode) if isinstance(self.dispatch_mode, Dispatch) else None

    @property
    def mode_shown(self) -> str:
        """Its dispatch mode, for people."""
        return _shown(self.dispatch_mode)

    @property
    def collects_all(self) -> bool:
        """Whether the results of all ranks come back, in rank order."""
        return self.dispatch_mode in (
            Dispatch.ONE_TO_ALL,
            Dispatch.ALL_TO_ALL,
            Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL,
        )


class RegisteredMethod(Generic[W_contra, P, R, G]):
    """A declared method: of a worker an ordinary method; of a worker group, one that is called on its ranks.

    On the class itself it is the declaration, to be given to ``WorkerGroup.method``, or to be named in a group's class::

        class ActorGroup(Cluster[Actor]):
            log_probs = Actor.log_probs
    """

    def __init__(self, function: Callable[..., Any], spec: MethodSpec) -> None:
        self.function = function
        self.spec = spec
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.__wrapped__ = function

    def __set_name__(self, owner: type, name: str) -> None:
        if not self.spec.owner:  # the first class that has it declares it; a group's class only names it
            self.spec = msgspec.structs.replace(self.spec, name=name, owner=owner.__qualname__)

    @overload
    def __get__(self, instance: None, owner: type) -> RegisteredMethod[W_contra, P, R, G]: ...
    @overload
    def __get__(self, instance: WorkerGroup[W_contra], owner: type) -> GroupMethod[P, G]: ...
    @overload
    def __get__(self, instance: W_contra, owner: type) -> Callable[P, R]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        if isinstance(instance, WorkerGroup):
            return GroupMethod(instance, self.spec)
        return self.function.__get__(instance, owner)

    def __call__(self, worker: W_contra, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the method itself, as ``super().method(...)`` and ``Class.method(worker, ...)`` do."""
        result: R = self.function(worker, *args, **kwargs)
        return result

    def __repr__(self) -> str:
        mode = self.spec.dispatch_mode
        return f"<{self.spec.full_name}, {mode.name if isinstance(mode, Dispatch) else mode}>"


class _AsList(Protocol):
    """What type checkers see of ``register`` where the results of all ranks come back."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[W, P], Coroutine[Any, Any, T]]
    ) -> RegisteredMethod[W, P, Coroutine[Any, Any, T], list[T]]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[W, P], R]) -> RegisteredMethod[W, P, R, list[R]]: ...


class _AsOne(Protocol):
    """Where the result of one rank comes back."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[W, P], Coroutine[Any, Any, T]]
    ) -> RegisteredMethod[W, P, Coroutine[Any, Any, T], T]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[W, P], R]) -> RegisteredMethod[W, P, R, R]: ...


class _Joined(Protocol):
    """Where the results of all parts are joined. Ranks whose results do not count may return None."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # what returns nothing anywhere is not joined
        self, function: Callable[Concatenate[W, P], None]
    ) -> RegisteredMethod[W, P, None, None]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[W, P], Coroutine[Any, Any, J | None]]
    ) -> RegisteredMethod[W, P, Coroutine[Any, Any, J | None], J]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[W, P], J | None]) -> RegisteredMethod[W, P, J | None, J]: ...


class _PerRank(Protocol):
    """Where every argument of a call has an entry for each rank."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[W, P], Coroutine[Any, Any, T]]
    ) -> RegisteredMethod[W, ..., Coroutine[Any, Any, T], list[T]]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[W, P], R]) -> RegisteredMethod[W, ..., R, list[R]]: ...


class _Reduced(Protocol[T]):
    """Where a function makes one value of the results of all parts."""

    def __call__(self, function: Callable[Concatenate[W, P], R]) -> RegisteredMethod[W, P, R, T]: ...


class _Custom(Protocol):
    """Where functions of the user's own decide."""

    def __call__(self, function: Callable[Concatenate[W, P], R]) -> RegisteredMethod[W, ..., R, Any]: ...


_Cutting: TypeAlias = Literal[Dispatch.DP_MP_COMPUTE, Dispatch.DP_MP_DISPATCH_FIRST] | AxisSharding
_Same: TypeAlias = Literal[Dispatch.ONE_TO_ALL, Dispatch.ONE_TO_ALL_ONE]


@overload
def register(dispatch_mode: _Same, execute_mode: Literal[Execute.RANK_ZERO]) -> _AsOne: ...
@overload
def register(dispatch_mode: Literal[Dispatch.ONE_TO_ALL], execute_mode: Literal[Execute.ALL] = Execute.ALL) -> _AsList: ...
@overload
def register(dispatch_mode: Literal[Dispatch.ONE_TO_ALL_ONE], execute_mode: Literal[Execute.ALL] = Execute.ALL) -> _AsOne: ...
@overload
def register(dispatch_mode: Literal[Dispatch.ALL_TO_ALL], execute_mode: Literal[Execute.ALL] = Execute.ALL) -> _PerRank: ...
@overload
def register(
    dispatch_mode: _Cutting,
    execute_mode: Literal[Execute.ALL] = Execute.ALL,
    *,
    shard: Sequence[str] | None = None,
    remainder: Remainder = "error",
    collect: Literal[Collect.JOIN] = Collect.JOIN,
) -> _Joined: ...
@overload
def register(
    dispatch_mode: _Cutting,
    execute_mode: Literal[Execute.ALL] = Execute.ALL,
    *,
    shard: Sequence[str] | None = None,
    remainder: Remainder = "error",
    collect: Literal[Collect.LIST],
) -> _AsList: ...
@overload
def register(
    dispatch_mode: _Cutting,
    execute_mode: Literal[Execute.ALL] = Execute.ALL,
    *,
    shard: Sequence[str] | None = None,
    remainder: Remainder = "error",
    collect: Callable[[list[Any]], T],
) -> _Reduced[T]: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL],
    execute_mode: Literal[Execute.ALL] = Execute.ALL,
    *,
    shard: Sequence[str] | None = None,
    remainder: Remainder = "error",
) -> _AsList: ...
@overload
def register(
    dispatch_mode: CustomDispatch | Mapping[str, Callable[..., Any]], execute_mode: Execute = Execute.ALL
) -> _Custom: ...
def register(
    dispatch_mode: DispatchMode | Mapping[str, Callable[..., Any]],
    execute_mode: Execute = Execute.ALL,
    *,
    shard: Sequence[str] | None = None,
    remainder: Remainder = "error",
    collect: Collect | Callable[[list[Any]], Any] | None = None,
) -> Any:
    """Declare how a worker's method is called on a group of workers.

    Args:
        dispatch_mode: a Dispatch; an AxisSharding; or functions of one's own (CustomDispatch).
        execute_mode: which ranks run it. RANK_ZERO goes with modes that give every rank the same, and with own functions.
        shard: names of the parameters that are cut, in modes that cut; None: all of them. The others are given to all ranks as
            they are. Arguments that are None are never cut.
        remainder: what becomes of rows that do not divide evenly, in modes that cut; 'pad' needs Batch arguments, which carry
            the mask, and results with a row for each row. A part may have no rows at all.
        collect: what becomes of the results, in modes that cut and do not collect from all ranks: a Collect, or a function that
            is given the list of them, in the order of the parts, and returns what the call returns.

    Raises: DispatchError where these do not go together.
    """

    def declare(function: Callable[..., Any]) -> RegisteredMethod[Any, ..., Any, Any]:
        return RegisteredMethod(function, _spec_of(function, dispatch_mode, execute_mode, shard, remainder, collect))

    return declare


def _shown(mode: DispatchMode) -> str:
    return mode.name if isinstance(mode, Dispatch) else type(mode).__name__


def _spec_of(
    function: Callable[..., Any],
    dispatch_mode: DispatchMode | Mapping[str, Callable[..., Any]],
    execute_mode: Execute,
    shard: Sequence[str] | None,
    remainder: Remainder,
    collect: Collect | Callable[[list[Any]], Any] | None,
) -> MethodSpec:
    name = getattr(function, "__qualname__", repr(function))

    def refuse(reason: str, step: str) -> DispatchError:
        return DispatchError(method=name, reason=reason, step=step)

    if not inspect.isfunction(function):
        raise refuse(
            f"register was given a {type(function).__name__}",
            "Use it as a decorator with arguments on a plain method, @register(Dispatch.ONE_TO_ALL), nearest to the function",
        )
    if isinstance(dispatch_mode, Mapping):
        if set(dispatch_mode) != {"dispatch_fn", "collect_fn"} or not all(map(callable, dispatch_mode.values())):
            raise refuse(
                f"a dispatch mode of one's own has the functions 'dispatch_fn' and 'collect_fn'; got {sorted(dispatch_mode)}",
                "Give both, or one of Dispatch",
            )
        mode: Any = CustomDispatch(**dispatch_mode)
    else:
        mode = dispatch_mode
    if not isinstance(mode, (Dispatch, AxisSharding, CustomDispatch)):
        raise refuse(f"{mode!r} is no dispatch mode", "Give one of Dispatch, an AxisSharding or a CustomDispatch")
    if not isinstance(execute_mode, Execute):
        raise refuse(f"{execute_mode!r} is no execute mode", f"Give one of {', '.join(map(str, Execute))}")
    if shard is not None and isinstance(shard, str):
        raise refuse(f"shard={shard!r} is one string", f"Give the names of parameters: shard=({shard!r},)")
    cuts = isinstance(mode, AxisSharding) or mode in _CUT
    shown = _shown(mode)
    if execute_mode is Execute.RANK_ZERO and (cuts or mode is Dispatch.ALL_TO_ALL):
        raise refuse(
            f"{shown} gives different ranks different things, and RANK_ZERO would drop all but the first",
            "Use ONE_TO_ALL, ONE_TO_ALL_ONE or functions of your own with RANK_ZERO, or Execute.ALL",
        )
    if not cuts and (shard is not None or remainder != "error"):
        raise refuse(f"{shown} cuts nothing, so shard and remainder mean nothing", "Leave them out, or choose a mode that cuts")
    if remainder not in ("error", "pad", "uneven"):
        raise refuse(f"remainder={remainder!r}", "Give 'error', 'pad' or 'uneven'")
    joins = cuts and mode is not Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL
    if collect is not None and (not joins or not (isinstance(collect, Collect) or callable(collect))):
        raise refuse(f"collect={collect} does not go with {shown}", "Leave it out, or choose a mode that cuts and joins")
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    named = {each.name for each in parameters}
    if unknown := [each for each in shard or () if each not in named]:
        raise refuse(
            f"shard names {', '.join(map(repr, unknown))}; its parameters are {', '.join(map(repr, sorted(named))) or 'none'}",
            "Name parameters of the method",
        )
    return MethodSpec(
        name=function.__name__,
        dispatch_mode=mode,
        execute_mode=execute_mode,
        shard=None if shard is None else tuple(shard),
        remainder=remainder,
        collect=(collect or Collect.JOIN) if joins else None,
        signature=signature.replace(parameters=parameters),
    )
