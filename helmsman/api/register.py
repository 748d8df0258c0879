"""The decorator ``register``, which declares how a worker group calls a worker's method."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from helmsman.api.batch import Batch
from helmsman.api.columns import Ragged
from helmsman.api.dispatch import (
    CUTS,
    AxisSharding,
    Collect,
    CustomDispatch,
    Dispatch,
    DispatchMode,
    Execute,
    MethodSpec,
    mode_name,
)
from helmsman.api.errors import DispatchError
from helmsman.api.parts import Remainder
from helmsman.api.worker_group import RegisteredMethod

if TYPE_CHECKING:
    import numpy as np
    import torch

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")
R = TypeVar("R")
J = TypeVar("J", bound="Batch | torch.Tensor | np.ndarray[Any, Any] | list[Any] | Ragged")


class _AsList(Protocol):
    """Type of ``register`` if the results of all ranks are returned."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[W, P], Coroutine[Any, Any, T]]
    ) -> RegisteredMethod[W, P, Coroutine[Any, Any, T], list[T]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[W, P], R]
    ) -> RegisteredMethod[W, P, R, list[R]]: ...


class _AsOne(Protocol):
    """Type of ``register`` if the result of one rank is returned."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[W, P], Coroutine[Any, Any, T]]
    ) -> RegisteredMethod[W, P, Coroutine[Any, Any, T], T]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[W, P], R]
    ) -> RegisteredMethod[W, P, R, R]: ...


class _Joined(Protocol):
    """Type of ``register`` if the results of all parts are joined.

    Ranks whose results are not used may return None.
    """

    @overload
    def __call__(  # type: ignore[overload-overlap]  # Methods without a result are not joined.
        self, function: Callable[Concatenate[W, P], None]
    ) -> RegisteredMethod[W, P, None, None]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[W, P], Coroutine[Any, Any, J | None]]
    ) -> RegisteredMethod[W, P, Coroutine[Any, Any, J | None], J]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[W, P], J | None]
    ) -> RegisteredMethod[W, P, J | None, J]: ...


class _PerRank(Protocol):
    """Type of ``register`` if every argument of a call has one entry per rank."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[W, P], Coroutine[Any, Any, T]]
    ) -> RegisteredMethod[W, ..., Coroutine[Any, Any, T], list[T]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[W, P], R]
    ) -> RegisteredMethod[W, ..., R, list[R]]: ...


class _Reduced(Protocol[T]):
    """Type of ``register`` if a function reduces the results of all parts to one value."""

    def __call__(
        self, function: Callable[Concatenate[W, P], R]
    ) -> RegisteredMethod[W, P, R, T]: ...


class _Custom(Protocol):
    """Type of ``register`` with user-defined dispatch functions."""

    def __call__(
        self, function: Callable[Concatenate[W, P], R]
    ) -> RegisteredMethod[W, ..., R, Any]: ...


_Cutting = Literal[Dispatch.DP_MP_COMPUTE, Dispatch.DP_MP_DISPATCH_FIRST] | AxisSharding
_Same = Literal[Dispatch.ONE_TO_ALL, Dispatch.ONE_TO_ALL_ONE]
_All = Literal[Execute.ALL]


class _Cut(TypedDict, total=False):
    """Options of modes that split rows."""

    shard: Sequence[str] | None
    remainder: Remainder


@overload
def register(dispatch_mode: _Same, execute_mode: Literal[Execute.RANK_ZERO]) -> _AsOne: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.ONE_TO_ALL], execute_mode: _All = Execute.ALL
) -> _AsList: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.ONE_TO_ALL_ONE], execute_mode: _All = Execute.ALL
) -> _AsOne: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.ALL_TO_ALL], execute_mode: _All = Execute.ALL
) -> _PerRank: ...
@overload
def register(
    dispatch_mode: _Cutting,
    execute_mode: _All = Execute.ALL,
    *,
    collect: Literal[Collect.JOIN] = Collect.JOIN,
    **cut: Unpack[_Cut],
) -> _Joined: ...
@overload
def register(
    dispatch_mode: _Cutting,
    execute_mode: _All = Execute.ALL,
    *,
    collect: Literal[Collect.LIST],
    **cut: Unpack[_Cut],
) -> _AsList: ...
@overload
def register(
    dispatch_mode: _Cutting,
    execute_mode: _All = Execute.ALL,
    *,
    collect: Callable[[list[Any]], T],
    **cut: Unpack[_Cut],
) -> _Reduced[T]: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL],
    execute_mode: _All = Execute.ALL,
    **cut: Unpack[_Cut],
) -> _AsList: ...
@overload
def register(
    dispatch_mode: CustomDispatch | Mapping[str, Callable[..., Any]],
    execute_mode: Execute = Execute.ALL,
) -> _Custom: ...
def register(
    dispatch_mode: DispatchMode | Mapping[str, Callable[..., Any]],
    execute_mode: Execute = Execute.ALL,
    *,
    shard: Sequence[str] | None = None,
    remainder: Remainder = "error",
    collect: Collect | Callable[[list[Any]], Any] | None = None,
) -> Any:
    """Declare how a group of workers calls a method.

    Args:
        dispatch_mode: A Dispatch, an AxisSharding, or user-defined functions (CustomDispatch).
        execute_mode: The ranks that run the method. RANK_ZERO requires a mode that gives every rank
            the same arguments, or user-defined functions.
        shard: Names of the parameters to split, for modes that split; None: all of them. All ranks
            get the other arguments unchanged. Arguments that are None are never split.
        remainder: Handling of rows that do not divide evenly, for modes that split. 'pad' requires
            Batch arguments, which carry the mask, and results with one row per input row. A
            part may have no rows.
        collect: Handling of the results, for modes that split and do not collect from all ranks. A
            Collect, or a function that takes the list of results, in the order of the parts, and
            returns the result of the call.

    Returns:
        A decorator for the method.

    Raises:
        DispatchError: The arguments do not fit each other or the method.
    """

    def declare(function: Callable[..., Any]) -> RegisteredMethod[Any, ..., Any, Any]:
        return RegisteredMethod(
            function, _spec_of(function, dispatch_mode, execute_mode, shard, remainder, collect)
        )

    return declare


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
            "Use it as a decorator with arguments on a plain method, "
            "@register(Dispatch.ONE_TO_ALL), nearest to the function",
        )
    if isinstance(dispatch_mode, Mapping):
        if set(dispatch_mode) != {"dispatch_fn", "collect_fn"} or not all(
            map(callable, dispatch_mode.values())
        ):
            raise refuse(
                "a custom dispatch mode has the functions 'dispatch_fn' and 'collect_fn'; "
                f"got {sorted(dispatch_mode)}",
                "Give both, or one of Dispatch",
            )
        mode: Any = CustomDispatch(**dispatch_mode)
    else:
        mode = dispatch_mode
    if not isinstance(mode, (Dispatch, AxisSharding, CustomDispatch)):
        raise refuse(
            f"{mode!r} is not a dispatch mode",
            "Give one of Dispatch, an AxisSharding or a CustomDispatch",
        )
    if not isinstance(execute_mode, Execute):
        raise refuse(
            f"{execute_mode!r} is not an execute mode",
            f"Give one of {', '.join(map(str, Execute))}",
        )
    if shard is not None and isinstance(shard, str):
        raise refuse(
            f"shard={shard!r} is one string", f"Give the names of parameters: shard=({shard!r},)"
        )
    cuts = isinstance(mode, AxisSharding) or mode in CUTS
    shown = mode_name(mode)
    if execute_mode is Execute.RANK_ZERO and (cuts or mode is Dispatch.ALL_TO_ALL):
        raise refuse(
            f"{shown} sends different arguments to each rank, and RANK_ZERO would drop all but "
            "the first",
            "Use ONE_TO_ALL, ONE_TO_ALL_ONE or functions of your own with RANK_ZERO, or "
            "Execute.ALL",
        )
    if not cuts and (shard is not None or remainder != "error"):
        raise refuse(
            f"{shown} does not split rows, so shard and remainder have no effect",
            "Omit them, or use a mode that splits rows, such as Dispatch.DP_MP_COMPUTE",
        )
    if remainder not in ("error", "pad", "uneven"):
        raise refuse(f"remainder is {remainder!r}", "Give 'error', 'pad' or 'uneven'")
    joins = cuts and mode is not Dispatch.DP_MP_DISPATCH_FIRST_COLLECT_ALL
    if collect is not None and (
        not joins or not (isinstance(collect, Collect) or callable(collect))
    ):
        raise refuse(
            f"collect={collect} cannot be combined with {shown}",
            "Omit it, or use a mode that splits rows and joins results, such as "
            "Dispatch.DP_MP_COMPUTE",
        )
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    named = {each.name for each in parameters}
    if unknown := [each for each in shard or () if each not in named]:
        raise refuse(
            f"shard contains {', '.join(map(repr, unknown))}, but the method's parameters are "
            f"{', '.join(map(repr, sorted(named))) or 'none'}",
            "Give names of parameters in shard",
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
